BEGIN TRANSACTION;
CREATE TABLE action (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	turn_id INTEGER NOT NULL, 
	action_type TEXT, 
	tool_name TEXT, 
	tool_args TEXT, 
	tokens TEXT, 
	logprobs TEXT, 
	num_tokens INTEGER, 
	created_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP, 
	CONSTRAINT fk_action_turn_id FOREIGN KEY(turn_id) REFERENCES turn (id) ON DELETE RESTRICT
);
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0001');
CREATE TABLE baseline (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	training_id INTEGER NOT NULL, 
	model_path TEXT NOT NULL, 
	status TEXT DEFAULT 'pending', 
	progress_percent REAL DEFAULT (0.0), 
	current_task_index INTEGER, 
	total_tasks INTEGER, 
	completed_tasks INTEGER, 
	current_phase TEXT, 
	status_message TEXT, 
	error_message TEXT, 
	start_time TIMESTAMP, 
	end_time TIMESTAMP, 
	eval_time TIMESTAMP, 
	success_rate REAL, 
	avg_reward REAL, 
	avg_turns REAL, 
	successful_tasks INTEGER, 
	metrics_json TEXT, 
	created_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP, 
	updated_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP, 
	CONSTRAINT ck_baseline_current_phase CHECK (current_phase IN ('initialization', 'rollout', 'validation', 'aggregation')), 
	CONSTRAINT ck_baseline_status CHECK (status IS NOT NULL AND status IN ('pending', 'running', 'completed', 'failed', 'cancelled')), 
	CONSTRAINT ck_baseline_progress_percent CHECK (progress_percent >= 0 AND progress_percent <= 100), 
	CONSTRAINT fk_baseline_training_id FOREIGN KEY(training_id) REFERENCES training (id) ON DELETE RESTRICT
);
CREATE TABLE environment (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	rollout_id INTEGER NOT NULL, 
	env_type TEXT NOT NULL, 
	status TEXT DEFAULT 'pending', 
	gbox_id TEXT, 
	box_type TEXT, 
	creation_time TIMESTAMP, 
	termination_time TIMESTAMP, 
	status_message TEXT, 
	error_message TEXT, 
	config_json TEXT, 
	created_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP, 
	updated_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP, 
	CONSTRAINT ck_environment_box_type CHECK (box_type IN ('android', 'linux')), 
	CONSTRAINT ck_environment_env_type CHECK (env_type IN ('android', 'linux')), 
	CONSTRAINT ck_environment_status CHECK (status IS NOT NULL AND status IN ('pending', 'creating', 'running', 'terminated', 'error')), 
	CONSTRAINT fk_environment_rollout_id FOREIGN KEY(rollout_id) REFERENCES rollout (id) ON DELETE RESTRICT
);
CREATE TABLE eval (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	training_id INTEGER NOT NULL, 
	step INTEGER NOT NULL, 
	model_path TEXT NOT NULL, 
	status TEXT DEFAULT 'pending', 
	progress_percent REAL DEFAULT (0.0), 
	current_task_index INTEGER, 
	total_tasks INTEGER, 
	completed_tasks INTEGER, 
	current_phase TEXT, 
	status_message TEXT, 
	error_message TEXT, 
	start_time TIMESTAMP, 
	end_time TIMESTAMP, 
	eval_time TIMESTAMP, 
	success_rate REAL, 
	avg_reward REAL, 
	avg_turns REAL, 
	successful_tasks INTEGER, 
	metrics_json TEXT, 
	created_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP, 
	updated_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP, 
	CONSTRAINT ck_eval_current_phase CHECK (current_phase IN ('initialization', 'rollout', 'validation', 'aggregation')), 
	CONSTRAINT ck_eval_status CHECK (status IS NOT NULL AND status IN ('pending', 'running', 'completed', 'failed', 'cancelled')), 
	CONSTRAINT ck_eval_progress_percent CHECK (progress_percent >= 0 AND progress_percent <= 100), 
	CONSTRAINT fk_eval_training_id FOREIGN KEY(training_id) REFERENCES training (id) ON DELETE RESTRICT
);
CREATE TABLE monitor_change (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	training_id INTEGER NOT NULL, 
	kind TEXT NOT NULL, 
	entity_id INTEGER NOT NULL, 
	changed_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP NOT NULL
);
CREATE TABLE monitor_client_id (
	project_id INTEGER NOT NULL, 
	kind TEXT NOT NULL, 
	client_id TEXT NOT NULL, 
	entity_id INTEGER NOT NULL, 
	CONSTRAINT pk_monitor_client_id PRIMARY KEY (project_id, kind, client_id)
)
 WITHOUT ROWID

;
CREATE TABLE monitor_delivery (
	project_id INTEGER NOT NULL, 
	spool TEXT NOT NULL, 
	last_seq INTEGER NOT NULL, 
	health_json TEXT, 
	updated_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP NOT NULL, 
	CONSTRAINT pk_monitor_delivery PRIMARY KEY (project_id, spool)
);
CREATE TABLE monitor_meta (
	"key" TEXT NOT NULL, 
	value TEXT NOT NULL, 
	CONSTRAINT pk_monitor_meta PRIMARY KEY ("key")
);
CREATE TABLE monitor_pending_environment (
	id INTEGER NOT NULL, 
	project_id INTEGER NOT NULL, 
	fields_json TEXT NOT NULL, 
	created_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP NOT NULL, 
	CONSTRAINT pk_monitor_pending_environment PRIMARY KEY (id)
);
CREATE TABLE monitor_project (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	name TEXT NOT NULL, 
	created_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP NOT NULL, 
	CONSTRAINT uq_monitor_project_name UNIQUE (name)
);
CREATE TABLE monitor_raw_value (
	kind TEXT NOT NULL, 
	entity_id INTEGER NOT NULL, 
	field TEXT NOT NULL, 
	value TEXT NOT NULL, 
	CONSTRAINT pk_monitor_raw_value PRIMARY KEY (kind, entity_id, field)
);
CREATE TABLE monitor_screenshot (
	sha256 TEXT NOT NULL, 
	media_type TEXT NOT NULL, 
	num_bytes INTEGER NOT NULL, 
	width INTEGER NOT NULL, 
	height INTEGER NOT NULL, 
	created_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP NOT NULL, 
	CONSTRAINT pk_monitor_screenshot PRIMARY KEY (sha256)
);
CREATE TABLE monitor_token (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	project_id INTEGER NOT NULL, 
	note TEXT, 
	token_hash TEXT NOT NULL, 
	scopes TEXT NOT NULL, 
	created_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP NOT NULL, 
	CONSTRAINT fk_monitor_token_project_id FOREIGN KEY(project_id) REFERENCES monitor_project (id) ON DELETE RESTRICT, 
	CONSTRAINT uq_monitor_token_token_hash UNIQUE (token_hash)
);
CREATE TABLE monitor_training_project (
	training_id INTEGER NOT NULL, 
	project_id INTEGER NOT NULL, 
	CONSTRAINT pk_monitor_training_project PRIMARY KEY (training_id), 
	CONSTRAINT fk_monitor_training_project_project_id FOREIGN KEY(project_id) REFERENCES monitor_project (id) ON DELETE RESTRICT, 
	CONSTRAINT fk_monitor_training_project_training_id FOREIGN KEY(training_id) REFERENCES training (id) ON DELETE RESTRICT
);
CREATE TABLE obs (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	turn_id INTEGER NOT NULL, 
	obs_type TEXT, 
	screenshot_uri TEXT, 
	text_content TEXT, 
	model_input_json TEXT, 
	created_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP, 
	CONSTRAINT ck_obs_obs_type CHECK (obs_type IN ('screenshot', 'text', 'multimodal')), 
	CONSTRAINT fk_obs_turn_id FOREIGN KEY(turn_id) REFERENCES turn (id) ON DELETE RESTRICT
);
CREATE TABLE rollout (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	source_type TEXT NOT NULL, 
	step_id INTEGER, 
	eval_id INTEGER, 
	baseline_id INTEGER, 
	rollout_id TEXT NOT NULL, 
	batch INTEGER, 
	"group" INTEGER, 
	env_index INTEGER, 
	task_id INTEGER NOT NULL, 
	model_path TEXT NOT NULL, 
	is_eval INTEGER DEFAULT 0, 
	status TEXT DEFAULT 'pending', 
	progress_percent REAL DEFAULT (0.0), 
	current_phase TEXT, 
	current_turn INTEGER, 
	status_message TEXT, 
	error_message TEXT, 
	start_time TIMESTAMP, 
	end_time TIMESTAMP, 
	env_creation_time TIMESTAMP, 
	agent_init_time TIMESTAMP, 
	task_start_time TIMESTAMP, 
	task_end_time TIMESTAMP, 
	validation_time TIMESTAMP, 
	rollout_time REAL, 
	task_completed INTEGER, 
	task_success INTEGER, 
	agent_reported_success INTEGER, 
	validation_passed INTEGER, 
	num_turns INTEGER, 
	max_turns INTEGER, 
	reward REAL, 
	temperature REAL, 
	num_total_actions INTEGER, 
	consecutive_repeated_actions INTEGER, 
	parse_errors INTEGER, 
	tool_name_errors INTEGER, 
	tool_arg_errors INTEGER, 
	runtime_errors INTEGER, 
	ran_out_of_turns INTEGER, 
	attempted_completion INTEGER, 
	turn_first_success INTEGER, 
	turn_task_completed INTEGER, 
	errors TEXT, 
	summary_json TEXT, 
	trajectory_path TEXT, 
	created_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP, 
	updated_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP, 
	CONSTRAINT ck_rollout_one_source CHECK ((source_type = 'step' AND step_id IS NOT NULL AND eval_id IS NULL AND baseline_id IS NULL) OR (source_type = 'eval' AND step_id IS NULL AND eval_id IS NOT NULL AND baseline_id IS NULL) OR (source_type = 'baseline' AND step_id IS NULL AND eval_id IS NULL AND baseline_id IS NOT NULL)), 
	CONSTRAINT ck_rollout_current_phase CHECK (current_phase IN ('env_creation', 'agent_initialization', 'task_execution', 'validation', 'cleanup')), 
	CONSTRAINT ck_rollout_source_type CHECK (source_type IN ('step', 'eval', 'baseline')), 
	CONSTRAINT ck_rollout_status CHECK (status IS NOT NULL AND status IN ('pending', 'env_creation', 'agent_init', 'running', 'completed', 'failed', 'cancelled')), 
	CONSTRAINT ck_rollout_agent_reported_success CHECK (agent_reported_success IN (0, 1)), 
	CONSTRAINT ck_rollout_attempted_completion CHECK (attempted_completion IN (0, 1)), 
	CONSTRAINT ck_rollout_is_eval CHECK (is_eval IN (0, 1)), 
	CONSTRAINT ck_rollout_progress_percent CHECK (progress_percent >= 0 AND progress_percent <= 100), 
	CONSTRAINT ck_rollout_ran_out_of_turns CHECK (ran_out_of_turns IN (0, 1)), 
	CONSTRAINT ck_rollout_task_completed CHECK (task_completed IN (0, 1)), 
	CONSTRAINT ck_rollout_task_success CHECK (task_success IN (0, 1)), 
	CONSTRAINT ck_rollout_validation_passed CHECK (validation_passed IN (0, 1)), 
	CONSTRAINT fk_rollout_baseline_id FOREIGN KEY(baseline_id) REFERENCES baseline (id) ON DELETE RESTRICT, 
	CONSTRAINT fk_rollout_eval_id FOREIGN KEY(eval_id) REFERENCES eval (id) ON DELETE RESTRICT, 
	CONSTRAINT fk_rollout_step_id FOREIGN KEY(step_id) REFERENCES step (id) ON DELETE RESTRICT, 
	CONSTRAINT fk_rollout_task_id FOREIGN KEY(task_id) REFERENCES task (id) ON DELETE RESTRICT
);
CREATE TABLE status_history (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	entity_type TEXT NOT NULL, 
	entity_id INTEGER NOT NULL, 
	old_status TEXT, 
	new_status TEXT NOT NULL, 
	progress_percent REAL, 
	status_message TEXT, 
	metadata_json TEXT, 
	changed_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP NOT NULL, 
	created_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP, 
	CONSTRAINT ck_status_history_entity_type CHECK (entity_type IN ('training', 'baseline', 'eval', 'step', 'rollout', 'environment'))
);
CREATE TABLE step (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	training_id INTEGER NOT NULL, 
	step INTEGER NOT NULL, 
	batch INTEGER, 
	status TEXT DEFAULT 'pending', 
	progress_percent REAL DEFAULT (0.0), 
	current_phase TEXT, 
	rollout_progress TEXT, 
	training_progress TEXT, 
	status_message TEXT, 
	error_message TEXT, 
	start_time TIMESTAMP, 
	end_time TIMESTAMP, 
	rollout_start_time TIMESTAMP, 
	rollout_end_time TIMESTAMP, 
	training_start_time TIMESTAMP, 
	training_end_time TIMESTAMP, 
	learning_rate REAL, 
	model_path TEXT, 
	checkpoint_path TEXT, 
	loss REAL, 
	kl_divergence REAL, 
	policy_gradient_norm REAL, 
	reward_mean REAL, 
	reward_std REAL, 
	num_trajectories INTEGER, 
	num_tokens INTEGER, 
	metrics_json TEXT, 
	created_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP, 
	updated_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP, 
	CONSTRAINT ck_step_current_phase CHECK (current_phase IN ('rollout_collection', 'rollout_execution', 'training', 'checkpointing')), 
	CONSTRAINT ck_step_status CHECK (status IS NOT NULL AND status IN ('pending', 'rollout_collecting', 'rollout_running', 'training', 'completed', 'failed')), 
	CONSTRAINT ck_step_progress_percent CHECK (progress_percent >= 0 AND progress_percent <= 100), 
	CONSTRAINT fk_step_training_id FOREIGN KEY(training_id) REFERENCES training (id) ON DELETE RESTRICT
);
CREATE TABLE task (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	task_id TEXT NOT NULL, 
	name TEXT NOT NULL, 
	description TEXT NOT NULL, 
	difficulty TEXT, 
	category TEXT, 
	max_steps INTEGER, 
	validation_type TEXT, 
	validation_query TEXT, 
	expected_result TEXT, 
	tags TEXT, 
	prerequisites TEXT, 
	app_name TEXT, 
	source_type TEXT, 
	created_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP, 
	updated_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP, 
	CONSTRAINT ck_task_category CHECK (category IN ('system', 'navigation', 'settings', 'app', 'input')), 
	CONSTRAINT ck_task_difficulty CHECK (difficulty IN ('easy', 'medium', 'hard')), 
	CONSTRAINT ck_task_validation_type CHECK (validation_type IN ('state', 'screenshot', 'api'))
);
CREATE TABLE training (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	run_name TEXT NOT NULL, 
	log_path TEXT NOT NULL, 
	model_name TEXT NOT NULL, 
	lora_rank INTEGER, 
	learning_rate REAL, 
	batch_size INTEGER, 
	group_size INTEGER, 
	groups_per_batch INTEGER, 
	max_tokens INTEGER, 
	temperature REAL, 
	kl_penalty_coef REAL, 
	num_substeps INTEGER, 
	max_turns INTEGER, 
	seed INTEGER, 
	box_type TEXT, 
	renderer_name TEXT, 
	wandb_project TEXT, 
	wandb_name TEXT, 
	status TEXT DEFAULT 'pending', 
	progress_percent REAL DEFAULT (0.0), 
	current_step INTEGER, 
	total_steps INTEGER, 
	current_phase TEXT, 
	status_message TEXT, 
	error_message TEXT, 
	start_time TIMESTAMP, 
	end_time TIMESTAMP, 
	last_heartbeat TIMESTAMP DEFAULT CURRENT_TIMESTAMP, 
	config_json TEXT, 
	created_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP, 
	updated_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP, 
	CONSTRAINT ck_training_box_type CHECK (box_type IN ('android', 'linux')), 
	CONSTRAINT ck_training_current_phase CHECK (current_phase IN ('initialization', 'rollout', 'training', 'evaluation', 'checkpointing')), 
	CONSTRAINT ck_training_status CHECK (status IS NOT NULL AND status IN ('pending', 'initializing', 'running', 'completed', 'failed', 'paused', 'cancelled')), 
	CONSTRAINT ck_training_progress_percent CHECK (progress_percent >= 0 AND progress_percent <= 100)
);
CREATE TABLE turn (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	rollout_id INTEGER NOT NULL, 
	turn INTEGER NOT NULL, 
	start_time TIMESTAMP DEFAULT CURRENT_TIMESTAMP NOT NULL, 
	end_time TIMESTAMP, 
	turn_time REAL, 
	reward REAL, 
	episode_done INTEGER, 
	metrics_json TEXT, 
	created_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP, 
	CONSTRAINT ck_turn_episode_done CHECK (episode_done IN (0, 1)), 
	CONSTRAINT fk_turn_rollout_id FOREIGN KEY(rollout_id) REFERENCES rollout (id) ON DELETE RESTRICT
);
CREATE TABLE validation (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	rollout_id INTEGER NOT NULL, 
	validator_id INTEGER, 
	validation_time TIMESTAMP DEFAULT CURRENT_TIMESTAMP NOT NULL, 
	validation_query TEXT, 
	expected_result TEXT, 
	actual_result TEXT, 
	success INTEGER NOT NULL, 
	execution_time REAL, 
	error_message TEXT, 
	details_json TEXT, 
	created_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP, 
	CONSTRAINT ck_validation_success CHECK (success IN (0, 1)), 
	CONSTRAINT fk_validation_rollout_id FOREIGN KEY(rollout_id) REFERENCES rollout (id) ON DELETE RESTRICT, 
	CONSTRAINT fk_validation_validator_id FOREIGN KEY(validator_id) REFERENCES validator (id) ON DELETE RESTRICT
);
CREATE TABLE validator (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	task_id INTEGER NOT NULL, 
	validator_type TEXT NOT NULL, 
	validation_query TEXT, 
	validation_method TEXT, 
	config_json TEXT, 
	created_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP, 
	CONSTRAINT fk_validator_task_id FOREIGN KEY(task_id) REFERENCES task (id) ON DELETE RESTRICT
);
CREATE INDEX idx_status_history_entity_type_entity_id ON status_history (entity_type, entity_id);
CREATE INDEX idx_status_history_entity_type_entity_id_changed_at ON status_history (entity_type, entity_id, changed_at);
CREATE UNIQUE INDEX idx_task_task_id ON task (task_id);
CREATE UNIQUE INDEX idx_training_run_name ON training (run_name);
CREATE INDEX idx_training_status ON training (status);
CREATE INDEX idx_training_status_last_heartbeat ON training (status, last_heartbeat);
CREATE INDEX idx_baseline_status ON baseline (status);
CREATE INDEX idx_baseline_training_id ON baseline (training_id);
CREATE INDEX idx_eval_status ON eval (status);
CREATE UNIQUE INDEX idx_eval_training_id_step ON eval (training_id, step);
CREATE INDEX idx_monitor_training_project ON monitor_training_project (project_id, training_id);
CREATE INDEX idx_step_status ON step (status);
CREATE UNIQUE INDEX idx_step_training_id_step ON step (training_id, step);
CREATE INDEX idx_validator_task_id ON validator (task_id);
CREATE UNIQUE INDEX idx_rollout_rollout_id ON rollout (rollout_id);
CREATE INDEX idx_rollout_source_type_baseline_id ON rollout (source_type, baseline_id);
CREATE INDEX idx_rollout_source_type_eval_id ON rollout (source_type, eval_id);
CREATE INDEX idx_rollout_source_type_step_id ON rollout (source_type, step_id);
CREATE INDEX idx_rollout_status ON rollout (status);
CREATE INDEX idx_rollout_task_id ON rollout (task_id);
CREATE UNIQUE INDEX idx_environment_rollout_id ON environment (rollout_id);
CREATE INDEX idx_environment_status ON environment (status);
CREATE UNIQUE INDEX idx_turn_rollout_id_turn ON turn (rollout_id, turn);
CREATE INDEX idx_validation_rollout_id ON validation (rollout_id);
CREATE INDEX idx_action_turn_id ON action (turn_id);
CREATE INDEX idx_obs_turn_id ON obs (turn_id);
COMMIT;
