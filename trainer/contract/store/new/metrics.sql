CREATE TABLE "keys" (
   "id" INTEGER PRIMARY KEY,
   "name" TEXT NOT NULL
);

CREATE UNIQUE INDEX "idx_keys_name"
    ON "keys" ("name");

CREATE TABLE metrics(key_id INTEGER, rank INTEGER, step INTEGER, timestamp REAL, value REAL, PRIMARY KEY(key_id, rank, step)) WITHOUT ROWID;

CREATE TABLE rollups(key_id INTEGER, rank INTEGER, level INTEGER, bucket INTEGER, n INTEGER, total REAL, low REAL, high REAL, PRIMARY KEY(key_id, rank, level, bucket)) WITHOUT ROWID;

CREATE TABLE "heartbeat" (
   "id" INTEGER PRIMARY KEY,
   "phase" TEXT,
   "step" INTEGER,
   "total_steps" INTEGER,
   "tokens" INTEGER,
   "timestamp" REAL,
   "dropped" INTEGER
);

CREATE TABLE "events" (
   "id" INTEGER PRIMARY KEY,
   "timestamp" REAL,
   "level" TEXT,
   "kind" TEXT,
   "message" TEXT
);

CREATE TABLE "rewinds" (
   "id" INTEGER PRIMARY KEY,
   "timestamp" REAL,
   "step" INTEGER
);

