// Fetches the page's main part again now and then, unless somebody is typing in
// it, has opened something in it, or looks elsewhere.
(() => {
  "use strict";
  const every = 10000;
  const main = () => document.querySelector("main[data-refresh]");
  const busy = () => {
    const part = main();
    return !part || document.hidden || part.contains(document.activeElement) && document.activeElement.matches("input,textarea,select,button") ||
      part.querySelector("details[open]") !== null ||
      [...part.querySelectorAll("input:not([type=hidden]),textarea")].some((field) => field.value !== field.defaultValue);
  };
  const refresh = async () => {
    if (busy()) return;
    try {
      const answer = await fetch(location.href, { headers: { "Reconciler-Refresh": "1" }, redirect: "error" });
      if (!answer.ok || busy()) return;
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const fresh = page.querySelector("main[data-refresh]");
      if (fresh) main().replaceChildren(...fresh.childNodes);
      document.documentElement.classList.remove("stale");
    } catch {
      document.documentElement.classList.add("stale");
    }
  };
  setInterval(refresh, every);
})();
