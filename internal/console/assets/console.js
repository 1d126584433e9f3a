// Fetches the page's main part again now and then, unless somebody types in it,
// has moved the focus into it, has selected or opened something in it, or looks
// elsewhere.
(() => {
  "use strict";
  const every = 10000;
  const main = () => document.querySelector("main[data-refresh]");
  const busy = () => {
    const part = main();
    if (!part || document.hidden) return true;
    const selection = getSelection();
    return part.querySelector(":focus-visible,button:focus,select:focus,details[open]") !== null ||
      !selection.isCollapsed && part.contains(selection.anchorNode) ||
      [...part.querySelectorAll("input:not([type=hidden]),textarea")].some((field) => field.value !== field.defaultValue);
  };
  // Tables stay scrolled to where they are.
  const show = (page) => {
    const fresh = page.querySelector("main[data-refresh]");
    if (!fresh) return;
    const scrolled = [...main().querySelectorAll(".scroll")].map((table) => table.scrollLeft);
    main().replaceChildren(...fresh.childNodes);
    main().querySelectorAll(".scroll").forEach((table, i) => { table.scrollLeft = scrolled[i] ?? 0; });
    document.querySelector("footer.foot").replaceWith(page.querySelector("footer.foot"));
  };
  const refresh = async () => {
    if (busy()) return;
    try {
      const answer = await fetch(location.href, { headers: { "Reconciler-Refresh": "1" }, redirect: "error" });
      if (!answer.ok) throw new Error(answer.statusText);
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      if (busy()) return; // somebody began while the page was on its way
      show(page);
      document.documentElement.classList.remove("stale");
    } catch {
      document.documentElement.classList.add("stale");
    }
  };
  setInterval(refresh, every);
})();
