BEGIN TRANSACTION;
CREATE TABLE about (
	name VARCHAR NOT NULL,
	value VARCHAR NOT NULL,
	PRIMARY KEY (name)
);
INSERT INTO "about" VALUES('schema','2');
CREATE TABLE attempts (
	run VARCHAR NOT NULL,
	stream VARCHAR NOT NULL,
	ordinal BIGINT NOT NULL,
	sample INTEGER NOT NULL,
	attempt INTEGER NOT NULL,
	cause VARCHAR NOT NULL,
	detail TEXT NOT NULL,
	worker VARCHAR,
	session VARCHAR,
	ended FLOAT NOT NULL,
	PRIMARY KEY (run, stream, ordinal, sample, attempt)
);
INSERT INTO "attempts" VALUES('demo','train',0,1,1,'agent_error','boom','w','s-1',1796049470.0);
CREATE TABLE audit (
	id INTEGER NOT NULL,
	at FLOAT NOT NULL,
	actor VARCHAR NOT NULL,
	what VARCHAR NOT NULL,
	why TEXT NOT NULL,
	data JSON NOT NULL,
	PRIMARY KEY (id)
);
INSERT INTO "audit" VALUES(1,1796049470.0,'ann','pause','lunch','{"node": "a"}');
CREATE TABLE batches (
	run VARCHAR NOT NULL,
	lineage INTEGER NOT NULL,
	step INTEGER NOT NULL,
	state VARCHAR NOT NULL,
	zero_variance INTEGER NOT NULL,
	stale INTEGER NOT NULL,
	reward_mean FLOAT NOT NULL,
	reward_std FLOAT NOT NULL,
	manifest_key VARCHAR,
	manifest_digest VARCHAR,
	PRIMARY KEY (run, lineage, step)
);
CREATE TABLE checkpoints (
	run VARCHAR NOT NULL,
	lineage INTEGER NOT NULL,
	step INTEGER NOT NULL,
	version INTEGER NOT NULL,
	path VARCHAR NOT NULL,
	digest VARCHAR NOT NULL,
	weights_path VARCHAR NOT NULL,
	weights_digest VARCHAR NOT NULL,
	metrics JSON NOT NULL,
	created FLOAT NOT NULL,
	PRIMARY KEY (run, lineage, step)
);
CREATE TABLE groups (
	run VARCHAR NOT NULL,
	stream VARCHAR NOT NULL,
	ordinal BIGINT NOT NULL,
	shard_key VARCHAR NOT NULL,
	sha256 VARCHAR NOT NULL,
	state VARCHAR NOT NULL,
	cause VARCHAR,
	start_version INTEGER,
	rewards JSON NOT NULL,
	lineage INTEGER,
	step INTEGER,
	PRIMARY KEY (run, stream, ordinal)
);
CREATE TABLE intervals (
	id INTEGER NOT NULL,
	run VARCHAR NOT NULL,
	node VARCHAR NOT NULL,
	kind VARCHAR NOT NULL,
	start FLOAT NOT NULL,
	"end" FLOAT NOT NULL,
	PRIMARY KEY (id),
	UNIQUE (run, node, kind, start)
);
INSERT INTO "intervals" VALUES(1,'demo','a','generate',1.0,2.0);
CREATE TABLE node_epochs (
	node VARCHAR NOT NULL,
	epoch BIGINT NOT NULL,
	PRIMARY KEY (node)
);
INSERT INTO "node_epochs" VALUES('a',7);
CREATE TABLE routes (
	lease VARCHAR NOT NULL,
	run VARCHAR NOT NULL,
	node VARCHAR NOT NULL,
	url VARCHAR NOT NULL,
	engine_kind VARCHAR NOT NULL,
	epoch BIGINT NOT NULL,
	version INTEGER NOT NULL,
	state VARCHAR NOT NULL,
	PRIMARY KEY (lease)
);
INSERT INTO "routes" VALUES('lease/a/1','demo','a','http://127.0.0.1:1','embedded',7,0,'open');
CREATE TABLE runs (
	run VARCHAR NOT NULL,
	spec JSON NOT NULL,
	spec_digest VARCHAR NOT NULL,
	created FLOAT NOT NULL,
	state VARCHAR NOT NULL,
	stopped FLOAT,
	lineage INTEGER NOT NULL,
	PRIMARY KEY (run)
);
INSERT INTO "runs" VALUES('demo','{"run": "demo", "steps": 3}','digest',1796049470.0,'created',NULL,0);
CREATE TABLE samples (
	run VARCHAR NOT NULL,
	stream VARCHAR NOT NULL,
	ordinal BIGINT NOT NULL,
	sample INTEGER NOT NULL,
	attempt INTEGER NOT NULL,
	state VARCHAR NOT NULL,
	cause VARCHAR,
	detail TEXT,
	worker VARCHAR,
	session VARCHAR,
	prompt_tokens BIGINT,
	completion_tokens BIGINT,
	turns INTEGER,
	min_version INTEGER,
	max_version INTEGER,
	output JSON,
	reward FLOAT,
	reward_worker VARCHAR,
	reward_until FLOAT,
	tokens BIGINT,
	lineage INTEGER,
	step INTEGER,
	PRIMARY KEY (run, stream, ordinal, sample)
);
INSERT INTO "samples" VALUES('demo','train',0,0,1,'scored',NULL,NULL,'w','s-0',3,4,1,0,0,5,0.5,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "samples" VALUES('demo','train',0,1,1,'failed','agent_error','boom','w','s-1',NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
CREATE TABLE sessions (
	session VARCHAR NOT NULL,
	key_hash VARCHAR NOT NULL,
	run VARCHAR NOT NULL,
	stream VARCHAR,
	ordinal BIGINT,
	sample INTEGER,
	attempt INTEGER NOT NULL,
	policy JSON NOT NULL,
	closed BOOLEAN NOT NULL,
	PRIMARY KEY (session),
	UNIQUE (key_hash)
);
INSERT INTO "sessions" VALUES('s-0','hash-0','demo','train',0,0,1,'{"temperature": 0.5}',1);
INSERT INTO "sessions" VALUES('s-1','hash-1','demo','train',0,1,1,'{"temperature": 0.5}',1);
INSERT INTO "sessions" VALUES('s-remote','hash-remote','demo',NULL,NULL,NULL,0,'{}',0);
CREATE TABLE steps (
	run VARCHAR NOT NULL,
	lineage INTEGER NOT NULL,
	step INTEGER NOT NULL,
	metrics JSON NOT NULL,
	recorded FLOAT NOT NULL,
	PRIMARY KEY (run, lineage, step)
);
INSERT INTO "steps" VALUES('demo',0,0,'{"loss": NaN}',1796049470.0);
CREATE TABLE streams (
	run VARCHAR NOT NULL,
	stream VARCHAR NOT NULL,
	admit_until BIGINT NOT NULL,
	target_in_flight INTEGER NOT NULL,
	samples_per_task INTEGER NOT NULL,
	paused BOOLEAN NOT NULL,
	produced BIGINT NOT NULL,
	PRIMARY KEY (run, stream)
);
INSERT INTO "streams" VALUES('demo','train',1,8,2,0,2);
CREATE INDEX samples_by_state ON samples (run, state, stream, ordinal, sample);
CREATE INDEX samples_by_step ON samples (run, lineage, step) WHERE step IS NOT NULL;
CREATE INDEX groups_by_state ON groups (run, stream, state, ordinal);
CREATE INDEX sessions_by_sample ON sessions (run, stream, ordinal, sample, attempt);
COMMIT;
