"""The defaults of the arguments of TRL 1.16, by the trainer: what an argument without a value reads as."""

from __future__ import annotations

from typing import Any

# Of all trainers.
COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 8, "num_train_epochs": 3.0, "max_steps": -1, "lr_scheduler_type": "linear", "warmup_steps": 0,
    "optim": "adamw_torch_fused", "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-08, "gradient_accumulation_steps": 1,
    "average_tokens_across_devices": True, "max_grad_norm": 1.0, "label_smoothing_factor": 0.0, "fp16": False, "bf16_full_eval": False,
    "fp16_full_eval": False, "gradient_checkpointing": True, "torch_compile": False, "use_liger_kernel": False, "use_cache": False,
    "auto_find_batch_size": False, "logging_strategy": "steps", "logging_steps": 10, "logging_first_step": False, "log_on_each_node": True,
    "logging_nan_inf_filter": True, "include_num_input_tokens_seen": "no", "log_level": "passive", "log_level_replica": "warning", "report_to": "none",
    "project": "huggingface", "eval_strategy": "no", "eval_delay": 0, "per_device_eval_batch_size": 8, "prediction_loss_only": False, "eval_on_start": False,
    "eval_do_concat_batches": True, "eval_use_gather_object": False, "include_for_metrics": [], "batch_eval_metrics": False, "save_only_model": False,
    "save_strategy": "steps", "save_steps": 500, "save_on_each_node": False, "enable_jit_checkpoint": False, "push_to_hub": False,
    "hub_strategy": "every_save", "hub_always_push": False, "load_best_model_at_end": False, "ignore_data_skip": False,
    "restore_callback_states_from_checkpoint": False, "full_determinism": False, "seed": 42, "use_cpu": False, "dataloader_drop_last": False,
    "dataloader_num_workers": 0, "dataloader_pin_memory": True, "dataloader_persistent_workers": False, "dataloader_in_order": True,
    "length_column_name": "length", "ddp_timeout": 1800, "debug": "", "skip_memory_metrics": True, "do_train": False, "do_eval": False, "do_predict": False,
    "local_rank": -1, "trust_remote_code": False, "pad_to_multiple_of": "auto", "lr_scheduler_kwargs": None, "optim_args": None, "optim_target_modules": None,
    "tf32": None, "activation_checkpointing": None, "activation_checkpointing_kwargs": None, "gradient_checkpointing_kwargs": None,
    "torch_compile_backend": None, "torch_compile_mode": None, "liger_kernel_config": None, "neftune_noise_alpha": None, "torch_empty_cache_steps": None,
    "disable_tqdm": None, "run_name": None, "trackio_space_id": None, "trackio_bucket_id": None, "trackio_static_space_id": None, "eval_steps": None,
    "eval_accumulation_steps": None, "save_total_limit": None, "hub_token": None, "hub_private_repo": None, "hub_model_id": None, "hub_revision": None,
    "metric_for_best_model": None, "greater_is_better": None, "data_seed": None, "accelerator_config": None, "parallelism_config": None,
    "dataloader_prefetch_factor": None, "dataloader_multiprocessing_context": None, "label_names": None, "ddp_find_unused_parameters": None,
    "ddp_bucket_cap_mb": None, "ddp_broadcast_buffers": None, "ddp_static_graph": None, "ddp_backend": None, "fsdp": None, "fsdp_config": None,
    "deepspeed": None, "resume_from_checkpoint": None, "model_init_kwargs": None, "dataset_num_proc": None,
}  # fmt: skip
SFT: dict[str, Any] = {
    "learning_rate": 2e-05, "remove_unused_columns": True, "train_sampling_strategy": "random", "dataset_text_field": "text", "max_length": 1024,
    "truncation_mode": "keep_start", "shuffle_dataset": False, "packing": False, "packing_strategy": "bfd", "padding_free": False,
    "assistant_only_loss": False, "loss_type": "nll", "activation_offloading": False, "router_aux_loss_coef": None, "chat_template_path": None,
    "dataset_kwargs": None, "eos_token": None, "eval_packing": None, "completion_only_loss": None, "pad_token": None,
}  # fmt: skip
DPO: dict[str, Any] = {
    "beta": 0.1, "learning_rate": 1e-06, "remove_unused_columns": True, "train_sampling_strategy": "random", "disable_dropout": True, "max_length": 1024,
    "truncation_mode": "keep_start", "padding_free": False, "precompute_ref_log_probs": False, "loss_type": ["sigmoid"], "f_divergence_type": "reverse_kl",
    "f_alpha_divergence_coef": 0.5, "label_smoothing": 0.0, "use_weighting": False, "discopop_tau": 0.05, "activation_offloading": False,
    "sync_ref_model": False, "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512, "router_aux_loss_coef": None, "precompute_ref_batch_size": None,
    "loss_weights": None, "ld_alpha": None, "pad_token": None,
}  # fmt: skip
KTO: dict[str, Any] = {
    "beta": 0.1, "loss_type": "kto", "learning_rate": 1e-06, "remove_unused_columns": True, "train_sampling_strategy": "sequential", "disable_dropout": True,
    "max_length": 1024, "precompute_ref_log_probs": False, "desirable_weight": 1.0, "undesirable_weight": 1.0, "activation_offloading": False,
    "sync_ref_model": False, "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512, "router_aux_loss_coef": None, "precompute_ref_batch_size": None,
}  # fmt: skip
REWARD: dict[str, Any] = {
    "learning_rate": 0.0001, "remove_unused_columns": True, "train_sampling_strategy": "random", "disable_dropout": True, "max_length": 1024,
    "activation_offloading": False, "chat_template_path": None, "eos_token": None, "center_rewards_coefficient": None, "pad_token": None,
}  # fmt: skip
GRPO: dict[str, Any] = {
    "num_generations": 8, "learning_rate": 1e-06, "remove_unused_columns": False, "train_sampling_strategy": "random", "disable_dropout": False,
    "cast_lm_head_to_fp32": False, "max_completion_length": 512, "ds3_gather_for_generation": True, "shuffle_dataset": True, "temperature": 1.0, "top_p": 1.0,
    "top_k": 0, "repetition_penalty": 1.0, "use_vllm": False, "vllm_mode": "colocate", "vllm_model_impl": "vllm", "vllm_enable_sleep_mode": False,
    "vllm_server_host": "0.0.0.0", "vllm_server_port": 8000, "vllm_server_timeout": 240.0, "vllm_group_port": 51216, "vllm_gpu_memory_utilization": 0.3,
    "vllm_tensor_parallel_size": 1, "beta": 0.0, "num_iterations": 1, "epsilon": 0.2, "sapo_temperature_neg": 1.05, "sapo_temperature_pos": 1.0,
    "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0, "importance_sampling_level": "token",
    "multi_objective_aggregation": "sum_then_normalize", "scale_rewards": "group", "loss_type": "dapo", "mask_truncated_completions": False,
    "sync_ref_model": False, "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512, "top_entropy_quantile": 1.0, "entropy_coef": 0.0,
    "use_adaptive_entropy": False, "entropy_coef_min": 0.0, "entropy_coef_max": 1.0, "entropy_coef_delta": 0.005, "entropy_target": 0.2,
    "vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 3.0,
    "use_bias_correction_kl": True, "log_completions": False, "log_multimodal": True, "log_unique_prompts": False,
    "use_transformers_continuous_batching": False, "use_transformers_paged": False, "router_aux_loss_coef": None, "num_generations_eval": None,
    "generation_batch_size": None, "steps_per_generation": None, "min_p": None, "generation_kwargs": None, "chat_template_kwargs": None,
    "cache_implementation": None, "vllm_structured_outputs_regex": None, "vllm_server_base_url": None, "vllm_max_model_length": None, "delta": None,
    "epsilon_high": None, "reward_weights": None, "max_tool_calling_iterations": None, "vllm_importance_sampling_clip_min": None,
    "off_policy_mask_threshold": None, "num_completions_to_print": None, "log_completions_hub_repo": None, "transformers_continuous_batching_config": None,
    "vllm_importance_sampling_cap": None,
}  # fmt: skip
