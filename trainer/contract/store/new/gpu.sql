CREATE TABLE gpu_metrics(host TEXT, gpu_index INTEGER, timestamp REAL, gpu_uuid TEXT, utilization INTEGER, memory_used INTEGER, memory_total INTEGER, temperature INTEGER, power_draw REAL, job_id INTEGER, energy REAL, PRIMARY KEY(host, gpu_index, timestamp)) WITHOUT ROWID;

CREATE TABLE gpu_minutes(host TEXT, gpu_index INTEGER, minute INTEGER, gpu_uuid TEXT, n INTEGER, utilization REAL, utilization_max INTEGER, memory_used INTEGER, memory_total INTEGER, temperature INTEGER, power_draw REAL, job_id INTEGER, PRIMARY KEY(host, gpu_index, minute)) WITHOUT ROWID;

