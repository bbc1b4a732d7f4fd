CREATE TABLE "jobs" (
   "id" INTEGER PRIMARY KEY,
   "name" TEXT NOT NULL,
   "state" TEXT NOT NULL,
   "config" TEXT NOT NULL,
   "user" TEXT,
   "host" TEXT NOT NULL,
   "device" TEXT NOT NULL,
   "gpu_source" TEXT,
   "gpu_ids" TEXT,
   "gpu_uuids" TEXT,
   "distributed" INTEGER,
   "world_size" INTEGER NOT NULL,
   "mode" TEXT,
   "boot_id" TEXT,
   "supervisor_pid" INTEGER,
   "supervisor_start" INTEGER,
   "attempt" INTEGER NOT NULL DEFAULT 0,
   "parent" INTEGER,
   "created" REAL NOT NULL,
   "started" REAL,
   "ended" REAL,
   "step" INTEGER NOT NULL DEFAULT 0,
   "total_steps" INTEGER,
   "tokens" INTEGER NOT NULL DEFAULT 0,
   "loss" REAL,
   "fvu" REAL,
   "l0" REAL,
   "dead_fraction" REAL,
   "tokens_per_s" REAL,
   "error" TEXT,
   "output_path" TEXT
, "d_in" INTEGER, "d_out" INTEGER, "estimated_memory_bytes" INTEGER, "peak_memory_bytes" INTEGER, "priority" INTEGER NOT NULL DEFAULT 0, "held" INTEGER NOT NULL DEFAULT 0, "after" TEXT NOT NULL DEFAULT '[]', "queued" REAL, "gpus_wanted" INTEGER NOT NULL DEFAULT 0, "any_gpus" INTEGER NOT NULL DEFAULT 0, "shares_gpus" INTEGER NOT NULL DEFAULT 0, "card_memory_bytes" INTEGER, "expected_s" REAL, "waits_for" TEXT, "max_restarts" INTEGER NOT NULL DEFAULT 0, "restarts" INTEGER NOT NULL DEFAULT 0, "backend" TEXT NOT NULL DEFAULT 'local', "tags" TEXT NOT NULL DEFAULT '[]', "note" TEXT NOT NULL DEFAULT '', "visible_devices" TEXT, "energy_wh" REAL, "energy_s" REAL, "energy_known_s" REAL, "energy_counted_s" REAL, "heldout_fvu" REAL, "heldout_l0" REAL, "machine_id" TEXT, "overfitting" TEXT, "array" INTEGER, "array_limit" INTEGER);

CREATE INDEX "idx_jobs_state_id"
    ON "jobs" ("state", "id");

CREATE TABLE "ranks" (
   "job_id" INTEGER,
   "attempt" INTEGER,
   "rank" INTEGER,
   "pid" INTEGER,
   "start_ticks" INTEGER,
   "boot_id" TEXT,
   "exit_code" INTEGER,
   "exit_signal" INTEGER,
   "ended" REAL,
   "error" TEXT,
   PRIMARY KEY ("job_id", "attempt", "rank")
);

CREATE TABLE "requests" (
   "id" INTEGER PRIMARY KEY,
   "job_id" INTEGER,
   "kind" TEXT,
   "created" REAL,
   "handled" REAL
);

CREATE INDEX "idx_requests_job_id_id"
    ON "requests" ("job_id", "id");

CREATE TABLE "events" (
   "id" INTEGER PRIMARY KEY,
   "job_id" INTEGER,
   "timestamp" REAL,
   "level" TEXT,
   "kind" TEXT,
   "message" TEXT
);

CREATE INDEX "idx_events_job_id_id"
    ON "events" ("job_id", "id");

CREATE TABLE "leases" (
   "host" TEXT,
   "gpu_uuid" TEXT,
   "gpu_index" INTEGER,
   "job_id" INTEGER NOT NULL,
   "user" TEXT,
   "pid" INTEGER,
   "since" REAL NOT NULL,
   "shared" INTEGER NOT NULL DEFAULT '0',
   "memory_bytes" INTEGER,
   PRIMARY KEY ("host", "gpu_uuid", "job_id")
);

