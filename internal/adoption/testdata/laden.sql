-- A shop that knows nothing of the reconciler: German names, an order header
-- with several lines, statuses of its own, soft deletes, orders partitioned by
-- date, and no column for activity version, bucket, reservation or request.
CREATE SCHEMA laden;

CREATE TYPE laden.bestellstatus AS ENUM ('neu', 'bezahlt', 'versandt', 'storniert');

CREATE TABLE laden.bestellung (                -- orders
    bestell_nr   bigint GENERATED ALWAYS AS IDENTITY,
    angelegt_am  timestamptz NOT NULL DEFAULT now(),
    kunde_nr     bigint NOT NULL,              -- customer
    aktion       text,                         -- campaign; NULL: an ordinary order
    status       laden.bestellstatus NOT NULL DEFAULT 'neu',
    geloescht_am timestamptz,                  -- soft delete
    PRIMARY KEY (bestell_nr, angelegt_am)
) PARTITION BY RANGE (angelegt_am);

CREATE TABLE laden.bestellung_alt PARTITION OF laden.bestellung FOR VALUES FROM (MINVALUE) TO ('2026-01-01');
CREATE TABLE laden.bestellung_2026 PARTITION OF laden.bestellung FOR VALUES FROM ('2026-01-01') TO ('2040-01-01');

CREATE TABLE laden.position (                  -- order lines
    bestell_nr  bigint NOT NULL,
    angelegt_am timestamptz NOT NULL,
    zeile       int NOT NULL,
    artikel     text NOT NULL,                 -- article
    menge       int NOT NULL DEFAULT 1,
    aktionsware boolean NOT NULL DEFAULT false, -- bought at the campaign's price
    storniert   boolean NOT NULL DEFAULT false, -- this line is cancelled
    PRIMARY KEY (bestell_nr, angelegt_am, zeile),
    FOREIGN KEY (bestell_nr, angelegt_am) REFERENCES laden.bestellung
);

CREATE TABLE laden.kontingent (                -- the campaign's stock, which the consumer deducts from
    aktion   text NOT NULL,
    artikel  text NOT NULL,
    menge    bigint NOT NULL,
    verkauft bigint NOT NULL DEFAULT 0 CHECK (verkauft BETWEEN 0 AND menge),
    PRIMARY KEY (aktion, artikel)
);

GRANT USAGE ON SCHEMA laden TO laden_consumer;
GRANT SELECT, INSERT, UPDATE ON ALL TABLES IN SCHEMA laden TO laden_consumer;
-- An order from before the campaign, and an ordinary one.
INSERT INTO laden.bestellung (kunde_nr, angelegt_am) VALUES (1, '2025-06-01'), (2, '2026-06-01');
