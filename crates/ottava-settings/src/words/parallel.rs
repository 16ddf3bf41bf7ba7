//! Words for memory, ranks, and everything around a run: of DeepSpeed, FSDP, torchtitan, Megatron, Colossal-AI and the trackers.

use super::meaning::Answer::{As, Default, Never, Unset};
use super::meaning::Meaning::{Is, Needless, Not, Only, Values};
use super::meaning::{Answer, Row};

pub(super) const ROWS: &[Row] = &[
    // Recomputation and offloading.
    ("gradient_checkpointing", Values("memory.recompute", RECOMPUTE)),
    ("activation_checkpointing", Values("memory.recompute", RECOMPUTE)),
    ("activation_checkpoint", Not(POLICIES)),
    ("activation_checkpoint.mode", Values("memory.recompute", RECOMPUTE)),
    (
        "disable_gradient_checkpointing",
        Values("memory.recompute", &[("true", As("\"none\"")), ("false", As("\"full\""))]),
    ),
    (
        "recompute_granularity",
        Values("memory.recompute", &[("full", As("\"full\"")), ("selective", As("\"norm-swiglu\""))]),
    ),
    ("recompute_method", Needless(POLICIES)),
    ("recompute_num_layers", Needless(POLICIES)),
    ("recompute_activations", Values("memory.recompute", &[("true", As("\"norm-swiglu\"")), ("false", Unset)])),
    ("selective_ac_option", Not(POLICIES)),
    ("selective_checkpointing", Only(&["false"], POLICIES)),
    ("activation_checkpointing_kwargs", Needless(POLICIES)),
    ("gradient_checkpointing_kwargs", Needless(POLICIES)),
    ("use_reentrant_gc", Needless(POLICIES)),
    (
        "activation_offloading",
        Values(
            "memory.offload_residuals",
            &[
                ("legacy", As("true")),
                ("disk", Never("activations are offloaded to host memory: `offload_residuals` under [memory]")),
            ],
        ),
    ),
    ("cpu_offload", Values("memory.offload_optimizer", OFFLOAD)),
    ("enable_cpu_offload", Values("memory.offload_optimizer", OFFLOAD)),
    ("optimizer_cpu_offload", Values("memory.offload_optimizer", OFFLOAD)),
    ("offload_optimizer.device", Values("memory.offload_optimizer", DEVICES)),
    ("offload_param.device", Values("memory.offload_parameters", DEVICES)),
    ("offload_optimizer.pin_memory", Needless(PINNED)),
    ("offload_param.pin_memory", Needless(PINNED)),
    ("offload_params", Values("memory.offload_parameters", OFFLOAD)),
    ("fsdp_offload_params", Values("memory.offload_parameters", OFFLOAD)),
    ("pin_memory", Needless(PINNED)),
    (
        "placement_policy",
        Not("write `offload_optimizer` and `offload_parameters` under [memory], shares from 0 to 1 or \"auto\""),
    ),
    ("torch_empty_cache_steps", Needless("memory is reused from step to step")),
    ("gc_steps", Needless("memory is reused from step to step")),
    ("gc_collect_steps", Needless("memory is reused from step to step")),
    ("gc_freq", Needless("memory is reused from step to step")),
    ("max_memory", Not("write `offload_optimizer = \"auto\"` under [memory], which fits a run into the GPU")),
    ("gpu_memory_limit", Not("write `offload_optimizer = \"auto\"` under [memory], which fits a run into the GPU")),
    // ZeRO and FSDP.
    ("zero_stage", Is("parallel.zero")),
    ("zero_optimization", Not("write `zero = 1`, 2 or 3 under [parallel], and `offload_optimizer` under [memory]")),
    ("zero_optimization.stage", Is("parallel.zero")),
    ("zero_optimization.mics_shard_size", Values("parallel.zero_shard_size", &[("-1", Default)])),
    ("zero_optimization.zero_hpz_partition_size", Only(&["1"], HPZ)),
    ("mics_shard_size", Values("parallel.zero_shard_size", &[("-1", Default)])),
    ("zero_hpz_partition_size", Only(&["1"], HPZ)),
    ("zero_optimization.*", Needless(BUCKETS)),
    ("deepspeed", Not(DEEPSPEED)),
    ("deepspeed_config_file", Not(DEEPSPEED)),
    ("deepspeed_plugin", Not("write `zero = 1`, 2 or 3 under [parallel]")),
    ("deepspeed_*", Needless(LAUNCH)),
    ("offload_optimizer_device", Values("memory.offload_optimizer", DEVICES)),
    ("offload_param_device", Values("memory.offload_parameters", DEVICES)),
    ("zero3_*", Needless("weights are gathered to save them, and never initialized whole on a rank")),
    ("zero_allow_untested_optimizer", Needless(BUCKETS)),
    ("zero_force_ds_cpu_optimizer", Needless(BUCKETS)),
    ("activation_checkpointing.*", Needless(POLICIES)),
    ("plugin", Values("parallel.zero", PLUGINS)),
    ("fsdp", Values("parallel.zero", FSDP_WORDS)),
    ("fsdp_config", Needless(FSDP)),
    ("fsdp_activation_checkpointing", Values("memory.recompute", RECOMPUTE)),
    ("fsdp_*", Needless(FSDP)),
    ("fsdp_sharding_strategy", Values("parallel.zero", SHARDING)),
    ("sharding_strategy", Values("parallel.zero", SHARDING)),
    ("data_parallel_sharding_strategy", Values("parallel.zero", MEGATRON_SHARDING)),
    ("reshard_after_forward", Values("parallel.zero", &[("true", As("3")), ("false", As("2"))])),
    ("fsdp_reshard_after_forward", Values("parallel.zero", &[("true", As("3")), ("false", As("2"))])),
    ("use_distributed_optimizer", Values("parallel.zero", &[("true", As("1")), ("false", As("0"))])),
    ("overlap_param_gather", Needless(BUCKETS)),
    ("overlap_grad_reduce", Needless(BUCKETS)),
    ("allgather_bucket_size", Needless(BUCKETS)),
    ("reduce_bucket_size", Needless(BUCKETS)),
    ("ddp_bucket_cap_mb", Needless(BUCKETS)),
    ("ddp_timeout", Is("parallel.communication.collective_timeout")),
    ("init_timeout_seconds", Is("parallel.communication.join_timeout")),
    ("train_timeout_seconds", Is("parallel.communication.collective_timeout")),
    ("distributed_timeout_minutes", Not("write `collective_timeout` under [parallel], in seconds")),
    ("ddp_*", Needless("ranks reduce all gradients; there is nothing to set")),
    ("ddp", Needless("ranks reduce all gradients; there is nothing to set")),
    (
        "communication_data_type",
        Values(
            "parallel.communication.reduce_dtype",
            &[
                ("fp32", As("\"float32\"")),
                ("bf16", As("\"bfloat16\"")),
                ("fp16", Never("gradients are sent as float32, bfloat16 or float8")),
            ],
        ),
    ),
    // Axes.
    ("data_parallel_size", Is("parallel.data")),
    ("dp_size", Is("parallel.data")),
    ("dp_shard_size", Is("parallel.data")),
    ("dp_replicate_size", Only(&["1"], REPLICATE)),
    ("data_parallel_replicate_degree", Only(&["1"], REPLICATE)),
    ("data_parallel_shard_degree", Values("parallel.data", &[("-1", Default)])),
    ("tensor_model_parallel_size", Is("parallel.tensor")),
    ("tensor_parallel_size", Is("parallel.tensor")),
    ("tensor_parallel_degree", Is("parallel.tensor")),
    ("tp_size", Is("parallel.tensor")),
    ("pipeline_model_parallel_size", Is("parallel.pipeline")),
    ("pipeline_parallel_degree", Is("parallel.pipeline")),
    ("pp_size", Is("parallel.pipeline")),
    ("context_parallel_size", Is("parallel.context")),
    ("context_parallel_degree", Is("parallel.context")),
    ("sequence_parallel_degree", Is("parallel.context")),
    ("cp_size", Is("parallel.context")),
    ("sp_size", Is("parallel.context")),
    ("expert_model_parallel_size", Is("parallel.expert")),
    ("expert_parallel_size", Is("parallel.expert")),
    ("expert_parallel_degree", Is("parallel.expert")),
    ("ep_size", Is("parallel.expert")),
    ("parallelism", Not("write `data`, `tensor`, `pipeline`, `context` and `expert` under [parallel]")),
    ("parallelism_config", Not("write `data`, `tensor`, `pipeline`, `context` and `expert` under [parallel]")),
    ("num_processes", Not(LAUNCH)),
    ("nproc_per_node", Not(LAUNCH)),
    ("num_machines", Not(LAUNCH)),
    ("num_gpus", Not(LAUNCH)),
    ("machine_rank", Not(LAUNCH)),
    ("main_process_ip", Not(LAUNCH)),
    ("main_process_port", Not(LAUNCH)),
    ("local_rank", Not(LAUNCH)),
    ("compute_environment", Needless(LAUNCH)),
    ("distributed_type", Needless(LAUNCH)),
    ("rdzv_backend", Needless(LAUNCH)),
    ("use_cpu", Values("device", &[("true", As("\"cpu\"")), ("false", Unset)])),
    ("no_cuda", Values("device", &[("true", As("\"cpu\"")), ("false", Unset)])),
    // Kernels.
    ("attn_implementation", Needless(ATTENTION)),
    ("flash_attention", Needless(ATTENTION)),
    ("flash_attn", Needless(ATTENTION)),
    ("flash_attn_*", Needless(ATTENTION)),
    ("use_flash_attn", Needless(ATTENTION)),
    ("sdp_attention", Needless(ATTENTION)),
    ("xformers_attention", Needless(ATTENTION)),
    ("flex_attention", Needless(ATTENTION)),
    ("attention_backend", Needless(ATTENTION)),
    ("s2_attention", Only(&["false"], "shifted sparse attention is not implemented")),
    ("shift_attn", Only(&["false"], "shifted sparse attention is not implemented")),
    ("use_liger_kernel", Needless(FUSED)),
    ("enable_liger_kernel", Needless(FUSED)),
    ("liger_*", Needless(FUSED)),
    ("cut_cross_entropy", Needless(FUSED)),
    ("use_unsloth", Needless(FUSED)),
    ("use_unsloth_gc", Needless(FUSED)),
    ("apply_rope_fusion", Needless(FUSED)),
    ("bias_activation_fusion", Needless(FUSED)),
    ("use_kernels", Needless(FUSED)),
    ("use_v1_kernels", Needless(FUSED)),
    ("fused_attn_kernel", Needless(FUSED)),
    ("flex_attn_*", Needless(ATTENTION)),
    ("tiled_mlp*", Needless("`recompute` under [memory] bounds the memory of activations")),
    ("experts_implementation", Not(EXPERTS)),
    ("use_scattermoe", Only(&["false"], EXPERTS)),
    ("use_sonicmoe", Only(&["false"], EXPERTS)),
    ("llama4_linearized_experts", Only(&["false"], EXPERTS)),
    ("moe_*", Not(EXPERTS)),
    ("router_aux_loss_coef", Not(EXPERTS)),
    (
        "use_kt",
        Only(
            &["false"],
            "KTransformers is not supported; `offload_parameters` under [memory] keeps weights on the host",
        ),
    ),
    ("kt_*", Not("KTransformers is not supported; `offload_parameters` under [memory] keeps weights on the host")),
    ("tpu_*", Needless("devices are NVIDIA GPUs and CPUs")),
    ("downcast_bf16", Needless("devices are NVIDIA GPUs and CPUs")),
    ("same_network", Needless(LAUNCH)),
    ("main_training_function", Needless(LAUNCH)),
    ("gpu_count", Not(LAUNCH)),
    ("node_count", Not(LAUNCH)),
    ("steps_per_print", Needless("`logging_steps` under [logging] is the number of steps between lines")),
    ("wall_clock_breakdown", Needless(PROFILES)),
    ("flops_profiler", Needless(PROFILES)),
    ("comms_logger", Needless(PROFILES)),
    ("memory_breakdown", Needless(PROFILES)),
    ("dump_state", Needless(PROFILES)),
    ("profile_*", Needless(PROFILES)),
    ("aio", Needless("states are offloaded to host memory, not to disks")),
    (
        "megatron_lm_config",
        Not("write `tensor`, `pipeline` and `expert` under [parallel], and `recompute` under [memory]"),
    ),
    ("dynamo_config", Needless(GRAPHS)),
    ("accelerator_config", Needless("every rank reads its own rows of each batch")),
    ("torch_compile", Needless(GRAPHS)),
    ("torch_compile_*", Needless(GRAPHS)),
    ("compile", Needless(GRAPHS)),
    ("plugins", Needless("there are no plugins; kernels are always fused")),
    ("mixture_of_depths", Not("mixture of depths is not implemented")),
    // Around a run.
    ("report_to", Values("logging.report_to", TRACKERS)),
    ("use_wandb", Values("logging.report_to", WANDB)),
    ("enable_wandb", Values("logging.report_to", WANDB)),
    ("use_tensorboard", Needless(TENSORBOARD)),
    ("enable_tensorboard", Needless(TENSORBOARD)),
    ("wandb_project", Is("logging.project")),
    ("wandb_name", Is("logging.run_name")),
    ("wandb_run_name", Is("logging.run_name")),
    ("wandb", Needless(ACCOUNT)),
    ("wandb_*", Needless(ACCOUNT)),
    ("mlflow_experiment_name", Is("logging.project")),
    ("mlflow_run_name", Is("logging.run_name")),
    ("mlflow_*", Needless("the variables MLFLOW_TRACKING_URI and MLFLOW_TRACKING_TOKEN name the server and its key")),
    ("trackio_*", Needless("the variables TRACKIO_SERVER_URL and TRACKIO_WRITE_TOKEN name the server and its key")),
    ("use_swanlab", Needless(OTHER_TRACKERS)),
    ("swanlab_*", Needless(OTHER_TRACKERS)),
    ("comet_*", Needless(OTHER_TRACKERS)),
    ("use_otel_metrics", Needless(OTHER_TRACKERS)),
    ("otel_metrics_*", Needless(OTHER_TRACKERS)),
    ("logging_dir", Needless(TENSORBOARD)),
    ("plot_loss", Needless("each run has loss.svg")),
    ("disable_tqdm", Needless("progress is a bar on a terminal and lines elsewhere")),
    ("log_level", Needless("the variable RUST_LOG sets the level of messages")),
    ("output", Is("output_dir")),
    ("save", Is("output_dir")),
    ("dump_folder", Is("output_dir")),
    ("overwrite_output_dir", Needless("a folder that holds a run is never overwritten; name another `output_dir`")),
    ("resume_from_checkpoint", Needless(RESUME)),
    ("auto_resume_from_checkpoints", Needless(RESUME)),
    ("ignore_data_skip", Needless(RESUME)),
    ("hub_*", Needless(LOCAL)),
    ("push_to_hub", Needless(LOCAL)),
    ("push_dataset_to_hub", Needless(LOCAL)),
    ("strict", Needless("an unknown key is always an error")),
    ("debug", Needless("`ottava plan --show-data` shows rows with their targets")),
    ("job", Not("write `output_dir` at the top of the file")),
    ("export_*", Not("`ottava export` and `ottava merge` write folders after the run")),
    ("merge_lora", Needless("`ottava merge` adds adapters to their base")),
    ("infer_backend", Needless("`ottava generate`, `chat` and `serve` run the model")),
    ("vllm*", Not("`ottava generate`, `chat` and `serve` run the model")),
    ("generation_*", Not("samples at the end of a run are set under [generation]")),
    ("use_ray", Only(&["false"], LAUNCH)),
    ("ray_*", Not(LAUNCH)),
];

const RECOMPUTE: &[(&str, Answer)] = &[
    ("true", As("\"full\"")),
    ("false", As("\"none\"")),
    ("unsloth", As("\"full\"")),
    ("offload", Never("write `recompute = \"full\"` and `offload_residuals = true` under [memory]")),
    ("offload_disk", Never("write `recompute = \"full\"` and `offload_residuals = true` under [memory]")),
    ("selective", As("\"norm-swiglu\"")),
];
const OFFLOAD: &[(&str, Answer)] = &[("true", As("1.0")), ("false", As("0.0"))];
const DEVICES: &[(&str, Answer)] =
    &[("cpu", As("1.0")), ("none", As("0.0")), ("nvme", Never("states are offloaded to host memory, not to disks"))];

const PLUGINS: &[(&str, Answer)] = &[
    ("torch_ddp", As("0")),
    ("zero1", As("1")),
    ("zero2", As("2")),
    ("low_level_zero", As("2")),
    ("gemini", As("3")),
    ("gemini_auto", As("3")),
    ("torch_fsdp", As("3")),
    ("zero2_cpu", Never("write `zero = 2` under [parallel] and `offload_optimizer = 1.0` under [memory]")),
    ("3d", Never("write `data`, `tensor` and `pipeline` under [parallel]")),
];
const SHARDING: &[(&str, Answer)] = &[
    ("FULL_SHARD", As("3")),
    ("SHARD_GRAD_OP", As("2")),
    ("NO_SHARD", As("0")),
    ("HYBRID_SHARD", Never(HYBRID)),
    ("HYBRID_SHARD_ZERO2", Never(HYBRID_ZERO2)),
    ("1", As("3")),
    ("2", As("2")),
    ("3", As("0")),
    ("4", Never(HYBRID)),
    ("5", Never(HYBRID_ZERO2)),
];
/// Of the key `fsdp` of transformers and Axolotl.
const FSDP_WORDS: &[(&str, Answer)] = &[
    ("true", As("3")),
    ("false", Unset),
    ("full_shard", As("3")),
    ("full_shard auto_wrap", As("3")),
    ("shard_grad_op", As("2")),
    ("shard_grad_op auto_wrap", As("2")),
    ("no_shard", As("0")),
    ("no_shard auto_wrap", As("0")),
    ("hybrid_shard", Never(HYBRID)),
    ("hybrid_shard auto_wrap", Never(HYBRID)),
    ("hybrid_shard_zero2", Never(HYBRID_ZERO2)),
    ("full_shard offload", Never(OFFLOADED)),
    ("full_shard auto_wrap offload", Never(OFFLOADED)),
];
const MEGATRON_SHARDING: &[(&str, Answer)] =
    &[("no_shard", As("0")), ("optim", As("1")), ("optim_grads", As("2")), ("optim_grads_params", As("3"))];

const EXPERTS: &str = "experts are computed by grouped products, and [router] has the factors of the losses of routers";
const POLICIES: &str = "`recompute` under [memory] is \"none\", \"norm-swiglu\", \"attention\", \"full\" or \"auto\"";
const PINNED: &str = "memory for transfers is always pinned";
const BUCKETS: &str = "gathers and reductions overlap with compute in buckets of a fixed size";
const FSDP: &str =
    "`zero` under [parallel] is 3 for full sharding; blocks are gathered one after the other, ahead of their use";
const DEEPSPEED: &str = "write `zero = 1`, 2 or 3 under [parallel]; `ottava import` reads the file that the key names, if it finds the file";
const PROFILES: &str = "metrics.jsonl has the times of steps, and `ottava plan` prints memory and FLOPs";
const OFFLOADED: &str = "write `zero = 3` under [parallel] and `offload_parameters = 1.0` under [memory]";
const HYBRID: &str = "write `zero = 3` under [parallel], and `zero_shard_size`, the number of GPUs of a host; groups of this size then store the same slices";
const HYBRID_ZERO2: &str = "write `zero = 2` under [parallel], and `zero_shard_size`, the number of GPUs of a host; groups of this size then store the same slices";
const REPLICATE: &str = "write `zero_shard_size` under [parallel], the ranks of a group that divides, and `data`, the ranks of all groups; the number of groups follows";
const HPZ: &str = "`zero_shard_size` under [parallel] divides weights and also optimizer states within groups of ranks, such as a host; second copies of weights alone are not implemented";
const LAUNCH: &str = "`ottava train --gpus N`, torchrun, mpirun or srun start the ranks; the file does not";
const ATTENTION: &str = "attention is always fused, and reads only what its mask leaves";
const FUSED: &str = "norms, RoPE, SwiGLU and the loss are always fused kernels";
const GRAPHS: &str = "steps are captured as CUDA graphs by themselves";
/// Trackers by a single name. A list of names has our own values.
const TRACKERS: &[(&str, Answer)] = &[
    ("none", Unset),
    ("tensorboard", As("[\"tensorboard\"]")),
    ("wandb", As("[\"wandb\"]")),
    ("mlflow", As("[\"mlflow\"]")),
    ("trackio", As("[\"trackio\"]")),
    ("all", Never("list the trackers: \"mlflow\", \"trackio\" or \"wandb\"")),
];
const WANDB: &[(&str, Answer)] = &[("true", As("[\"wandb\"]")), ("false", Unset)];
const TENSORBOARD: &str = "each run writes events for TensorBoard into its folder";
const ACCOUNT: &str = "`wandb sync` sends the file of a run, and asks for the account";
const OTHER_TRACKERS: &str = "this tracker reads the run's TensorBoard events or metrics.jsonl; `report_to` under [logging] names \"mlflow\", \"trackio\" or \"wandb\"";
const RESUME: &str = "`ottava train RUN.toml --resume` continues a run, at its place in the data";
const LOCAL: &str = "nothing is sent anywhere during a run; `ottava push FOLDER OWNER/NAME` uploads a model afterwards";
