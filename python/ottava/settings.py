"""The tables of a run's file. `scripts/make_python_settings.py` writes this module from `configs/run.schema.json`; do not edit it.

Each field is a key of the file, and None is the default of the key. `ottava config reference` prints all keys, their defaults and their whole texts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Optional, Union

from ._table import Table


@dataclass
class Model(Table):
    """The model."""
    path: Optional[str] = None
    """A Hugging Face model folder, or a name of the Hub, such as "Qwen/Qwen3-0.6B" or "OWNER/NAME@REVISION", which is downloaded."""
    init: Optional[Literal["pretrained", "random"]] = None
    """Initial weights: "pretrained" (the weights in the folder) or "random"."""
    tokenizer: Optional[str] = None
    """A tokenizer.json, or a folder with a tokenizer.json; "" uses the tokenizer in the model folder."""


@dataclass
class Tokenizer(Table):
    """Changes to the tokenizer of the model."""
    added_tokens: Optional[list[str]] = None
    """Tokens to add to the tokenizer."""
    added_special_tokens: Optional[list[str]] = None
    """Special tokens to add, such as ["<|im_start|>", "<|im_end|>"]: like added_tokens, but generated texts can leave them out."""
    special_tokens: Optional[dict[str, str]] = None
    """Special tokens by name: bos_token, eos_token, unk_token, sep_token, pad_token, cls_token, mask_token."""
    chat_template: Optional[str] = None
    """A built-in chat template that replaces the template of the folder: "chatml", "llama3", "gemma", "phi3", "zephyr", "vicuna" or "alpaca"; "" keeps the template of the folder."""
    pad_vocab_to_multiple_of: Optional[int] = None
    """Rows of embedding and head are padded to a multiple of this number; 1 adds no padding."""


@dataclass
class Lora(Table):
    """Adapters that are trained instead of the model."""
    r: Optional[int] = None
    """Rank of the adapters that are trained instead of the model, as in PEFT: y = x Wᵀ + (lora_alpha / r) (x Aᵀ) Bᵀ."""
    lora_alpha: Optional[float] = None
    """Numerator of the adapters' factor lora_alpha / r."""
    target_modules: Optional[Union[str, list[str]]] = None
    """Linears that have adapters: "all-linear" (all linears of the blocks), a list of names, such as ["q_proj", "v_proj"], or a regular expression of whole names, such as ".*(q|v)_proj"."""
    target_parameters: Optional[list[str]] = None
    """Parameters that have adapters, by the ends of their names in transformers, as in PEFT: stacked matrices of experts, such as ["experts.gate_up_proj", "experts.down_proj"], and weights of routers, such as ["gate.weight"]."""
    exclude_modules: Optional[Union[str, list[str]]] = None
    """Linears of target_modules that have no adapters: a list of names, or a regular expression of whole names."""
    layers_to_transform: Optional[list[int]] = None
    """Numbers of the layers whose linears have adapters, if target_modules is a list of names; [] means all layers."""
    layers_pattern: Optional[list[str]] = None
    """Names before the numbers of layers, such as ["layers"]; [] means any name."""
    modules_to_save: Optional[list[str]] = None
    """Modules without linears that are trained whole and saved with the adapters, by the ends of their names, as in PEFT: the embedding, the head and norms."""
    rank_pattern: Optional[dict[str, int]] = None
    """Values that replace r for linears whose names end with a match of a regular expression."""
    alpha_pattern: Optional[dict[str, float]] = None
    """Values that replace lora_alpha for linears whose names end with a match of a regular expression."""
    lora_dropout: Optional[float] = None
    """Probability with which training sets an element of an adapter's input to 0, as in PEFT."""
    loraplus_lr_ratio: Optional[float] = None
    """Factor of the learning rate of the adapters' matrices B (LoRA+)."""
    load_in_4bit: Optional[bool] = None
    """Whether the frozen matrices of the blocks are stored in four bits (QLoRA): NF4 in blocks of 64, with quantized scales, as in bitsandbytes."""
    use_rslora: Optional[bool] = None
    """Whether the factor of the adapters is lora_alpha / sqrt(r) (rsLoRA)."""
    use_dora: Optional[bool] = None
    """Whether adapters also have a trained magnitude for each output (DoRA): each output is multiplied by its magnitude and divided by the norm of its row of W + lora_alpha / r · B A."""
    init_from: Optional[str] = None
    """A PEFT folder, such as a checkpoint of adapters, with the adapters that the run starts from; "" creates new adapters."""


@dataclass
class DataRecords(Table):
    """How the records of files are read."""
    formatting: Optional[Literal["auto", "text", "messages", "prompt_completion", "alpaca", "sharegpt", "tokens", "labeled_tokens", "preference", "unpaired_preference", "prompts", "classification", "embedding"]] = None
    """The fields of the records of a file."""
    text_field: Optional[str] = None
    """The field of a record that holds the text."""
    text_documents: Optional[Literal["line", "file"]] = None
    """What counts as a document in a text file: "file" (the whole file) or "line"."""
    fields: Optional[dict[str, str]] = None
    """Ottava's names of fields with the names in your files."""
    roles: Optional[dict[str, Union[str, list[str]]]] = None
    """Ottava's names of roles with the names in your files."""
    ignored_fields: Optional[list[str]] = None
    """Fields of messages to ignore."""
    on_bad_record: Optional[Literal["error", "skip"]] = None
    """What to do with a record that cannot be used: "error" ends the run, "skip" drops the record and counts it."""
    max_bad_records: Optional[int] = None
    """The maximum number of records that "skip" drops per file."""


@dataclass
class DataChat(Table):
    """How conversations are rendered and tokenized."""
    chat_template_path: Optional[str] = None
    """A file with the chat template; "" uses the chat template in the folder of the tokenizer."""
    chat_template_kwargs: Optional[dict[str, Any]] = None
    """Further variables of the chat template."""
    roles_to_train: Optional[list[str]] = None
    """Roles of the messages that contribute to the loss."""
    train_on_eos: Optional[Literal["turn", "all", "last", "none"]] = None
    """Turns in which the end-of-turn token contributes to the loss: "turn" (every trained turn; the text after the token in the turn contributes too), "all" (also turns that are not trained on), "last" (the last trained turn) or "none"."""


@dataclass
class Data(Table):
    """The data to train on and to validate with."""
    train_files: Optional[list[str]] = None
    """Training files, folders of training files, or patterns such as "data/*.jsonl"."""
    val_files: Optional[list[str]] = None
    """Validation files, folders or patterns, in the formats of train_files; [] holds out val_set_size of the documents of train_files instead."""
    records: Optional[DataRecords] = None
    chat: Optional[DataChat] = None
    train_on_inputs: Optional[bool] = None
    """Whether prompts contribute to the loss too; with false, only completions and turns of the assistant contribute."""
    packing: Optional[Literal["auto", "wrapped", "bfd", "none"]] = None
    """How documents are packed into rows: "wrapped" (one stream, cut into full rows), "bfd" (whole documents, packed into rows by best-fit decreasing), "none" (one document in each row), or "auto" ("bfd" if records hold conversations or completions, else "wrapped")."""
    document_mask: Optional[Union[Literal["auto"], bool]] = None
    """Whether tokens attend only to their own document, and positions restart at each document: true, false, or "auto" (true unless packing is "wrapped")."""
    excess_length_strategy: Optional[Literal["truncate", "raise"]] = None
    """What to do with a whole document that is longer than max_length: "truncate" keeps its beginning, "raise" is an error."""
    val_set_size: Optional[float] = None
    """Documents of train_files that are held out for validation: a fraction below 1, or a number of documents; 0 holds out none."""
    max_length: Optional[int] = None
    """Tokens per sequence; at most the number of positions of the model."""
    cache_dir: Optional[str] = None
    """Where prepared tokens are stored; "" means the folder `tokens` beside output_dir."""
    streaming: Optional[bool] = None
    """Whether files of train_files are fetched and tokenized while the run trains, instead of before it (docs/data.md)."""
    shuffle_shards: Optional[int] = None
    """With streaming, the number of files whose documents are shuffled together."""
    cached_shards: Optional[int] = None
    """With streaming, the maximum number of files whose copies and tokens are on disk, at least twice shuffle_shards; 0 keeps all."""
    datasets: Optional[list[dict[str, Any]]] = None
    """Several data sets instead of train_files and val_files, each a table `[[data.datasets]]` with name, train_files and, optionally, val_files, formatting, text_field, fields and roles."""


@dataclass
class Preference(Table):
    """The loss of preference data."""
    loss_type: Optional[Union[Literal["auto"], Union[Literal["sigmoid", "robust", "hinge", "ipo", "sigmoid_norm", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "cpo", "simpo", "orpo", "bradley_terry", "kto", "apo_zero_unpaired"], list[Literal["sigmoid", "robust", "hinge", "ipo", "sigmoid_norm", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "cpo", "simpo", "orpo", "bradley_terry", "kto", "apo_zero_unpaired"]]]]] = None
    """The loss, by TRL's names."""
    loss_weights: Optional[list[float]] = None
    """The factors of the losses of a list, in the order of loss_type; [] means 1 for each loss."""
    beta: Optional[float] = None
    """The reward of a completion is beta times its log-probability minus its log-probability under the reference model."""
    label_smoothing: Optional[float] = None
    """The share of pairs whose preference is assumed to be wrong, from 0 to less than 0.5; for "sigmoid" (conservative DPO), "robust", "exo_pair" (which requires it, for example 1e-3), "aot", "aot_unpaired", "cpo" and "simpo"."""
    cpo_alpha: Optional[float] = None
    """The factor of the negative log-likelihood of the chosen completions in "cpo"."""
    simpo_gamma: Optional[float] = None
    """The margin of "simpo" by which the reward of the chosen completion should exceed the reward of the rejected one."""
    discopop_tau: Optional[float] = None
    """The temperature of "discopop"."""
    reference_free: Optional[bool] = None
    """true trains without a reference model: the log-probabilities of the reference model are 0 in every loss, and nothing is computed for them."""
    center_rewards_coefficient: Optional[float] = None
    """The factor of the squared sum of the rewards of a pair, which draws the rewards of "bradley_terry" to a mean of 0."""
    desirable_weight: Optional[float] = None
    """The factor of the losses of desirable completions, for "kto" and "apo_zero_unpaired"."""
    undesirable_weight: Optional[float] = None
    """The factor of the losses of undesirable completions, for "kto" and "apo_zero_unpaired"."""
    precompute_ref_log_probs: Optional[Union[Literal["auto"], bool]] = None
    """Where the log-probabilities of the reference model come from: true computes them before the first step and stores them in the run's folder; false computes them in each step by the model without its adapters."""


@dataclass
class ReinforcementSampling(Table):
    """How completions are drawn."""
    temperature: Optional[float] = None
    """The temperature at which completions are drawn."""
    dynamic_sampling: Optional[bool] = None
    """Whether prompts whose completions all have the same reward are replaced by further prompts, since nothing is learned from them (DAPO)."""
    max_rounds: Optional[int] = None
    """How often the prompts of a generation are drawn at most, with dynamic_sampling."""
    kv_cache_tokens: Optional[int] = None
    """Tokens of the KV cache while completions are drawn; 0 for as many as the completions need and memory has room for."""
    kv_cache_dtype: Optional[Literal["auto", "bfloat16", "fp8"]] = None
    """The format of the KV cache while completions are drawn: "auto" for the compute type, "bfloat16", or "fp8"."""
    max_staleness: Optional[int] = None
    """The maximum age, in steps, of the weights that drew the first tokens of a completion, counted from the weights of its generation."""


@dataclass
class ReinforcementAdvantage(Table):
    """The advantage of a completion."""
    estimator: Optional[Literal["grpo", "rloo", "reinforce_plus_plus", "gae"]] = None
    """What a reward is compared with: "grpo" (the mean of its group), "rloo" (the mean of the others of its group), "reinforce_plus_plus" (the mean over all tokens of a generation) or "gae" (the values of tokens that a value head estimates: PPO)."""
    scale_rewards: Optional[Literal["group", "batch", "none"]] = None
    """The standard deviation by which "grpo" and "rloo" divide: "group", "batch" (all completions of a generation) or "none" (as in Dr. GRPO)."""
    gamma: Optional[float] = None
    """The discount of a reward per token with "gae", above 0 and at most 1."""
    lambda_: Optional[float] = None
    """The decay of errors of values per token with "gae", from 0 (an advantage compares with the value of the next token) to 1 (with the reward itself)."""


@dataclass
class ReinforcementLoss(Table):
    """The loss of tokens."""
    loss_type: Optional[Literal["dapo", "grpo", "dr_grpo", "gspo", "cispo", "reinforce"]] = None
    """The loss: "dapo" (clipped ratios of tokens, mean over all tokens of a step), "grpo" (mean over completions of the means over their tokens), "dr_grpo" (sum over tokens divided by max_completion_length, mean over completions), "gspo" (clipped ratios of completions, mean over completions), "cispo" (clipped weights, mean over tokens) or "reinforce" (no ratio, mean over tokens)."""
    epsilon: Optional[float] = None
    """How far below 1 the ratio of new and old probability is followed."""
    epsilon_high: Optional[float] = None
    """How far above 1 the ratio is followed; 0 is epsilon."""
    delta: Optional[float] = None
    """The bound of the ratio of completions with a negative advantage, above 1 + epsilon; 0 for no bound."""
    beta: Optional[float] = None
    """The factor of the divergence from the reference model; 0 for none."""
    kl_estimator: Optional[Literal["weighted_k3", "k1", "k2", "k3"]] = None
    """The estimator of the divergence: "weighted_k3" (unbiased gradient), "k1", "k2" or "k3" (biased, as in GRPO's paper)."""
    entropy_coef: Optional[float] = None
    """The factor of the entropy of each token's distribution, which is subtracted from the loss of the token, so that draws stay different; 0 for none."""
    vf_coef: Optional[float] = None
    """The factor of the loss of values, with advantage.estimator = "gae"."""
    cliprange_value: Optional[float] = None
    """How far the value of a token may move from its value at the draw and still reduce the loss of values; 0 for no bound."""


@dataclass
class ReinforcementCorrection(Table):
    """Factors of the loss that correct for draws whose log-probabilities are not the ones that steps compute."""
    mode: Optional[Literal["auto", "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]] = None
    """How the loss of a token is corrected: "none" (old probabilities are the probabilities of the draws), "token_truncate" (times the ratio of the token, at most max), "token_mask" (times the ratio, and 0 if the ratio is below min or above max), "sequence_truncate" or "sequence_mask" (the same with the ratio of the completion)."""
    min: Optional[float] = None
    """The smallest ratio that a mask keeps."""
    max: Optional[float] = None
    """The largest ratio."""


@dataclass
class ReinforcementEnvironment(Table):
    """A program that answers the turns of the model."""
    command: Optional[list[str]] = None
    """The program and its arguments, without a shell: ["python3", "environment.py"]."""
    max_turns: Optional[int] = None
    """Turns of the model at most."""
    processes: Optional[int] = None
    """Processes that run at the same time on each rank; each answers other turns."""
    batch_size: Optional[int] = None
    """The most turns of a request, each of another conversation."""
    timeout: Optional[float] = None
    """Seconds in which a request must be answered; after that, the process is killed."""
    attempts: Optional[int] = None
    """Attempts for each request; each one after the first has a new process."""
    on_error: Optional[Literal["stop", "zero", "skip"]] = None
    """What happens to the conversations of a request after its last attempt: "stop" ends the run with the error, "zero" ends the conversations with a reward of 0 for their last turns, and "skip" ends them without a reward for their last turns."""


@dataclass
class ReinforcementEndpoint(Table):
    """An address where clients draw completions and return them with their rewards."""
    address: Optional[str] = None
    """The address and the port, such as "127.0.0.1:8009"; port 0 takes a free port."""
    max_staleness: Optional[int] = None
    """How many steps older than the weights of today the weights may be that have drawn a completion."""


@dataclass
class Reinforcement(Table):
    """Reinforcement learning."""
    num_generations: Optional[int] = None
    """Completions of each prompt, which are compared with each other: the group of GRPO."""
    prompts_per_generation: Optional[int] = None
    """Prompts whose completions are drawn at once, by all ranks together; 0 draws the completions of one step."""
    num_iterations: Optional[int] = None
    """How often each completion is used for a step."""
    max_completion_length: Optional[int] = None
    """Tokens of a completion at most; with an environment, tokens of a turn at most, and a conversation ends at data.max_length."""
    mask_truncated_completions: Optional[bool] = None
    """Whether completions that reach max_completion_length contribute nothing to the loss."""
    sampling: Optional[ReinforcementSampling] = None
    advantage: Optional[ReinforcementAdvantage] = None
    loss: Optional[ReinforcementLoss] = None
    correction: Optional[ReinforcementCorrection] = None
    environment: Optional[ReinforcementEnvironment] = None
    endpoint: Optional[ReinforcementEndpoint] = None
    rewards: Optional[list[dict[str, Any]]] = None
    """What scores completions: a table `[[reinforcement.rewards]]` for each reward, with its type, its weight and its own keys (docs/rewards.md)."""


@dataclass
class Distillation(Table):
    """Distillation."""
    teacher: Optional[str] = None
    """The folder of the teacher: a language model with the tokens of the model that is trained."""
    logits: Optional[str] = None
    """The folder of the teacher's distributions, which `ottava logits` writes: the teacher does not run beside the model."""
    top_k: Optional[int] = None
    """The likeliest tokens of each distribution in `logits`; all other tokens are one event of the divergence."""
    beta: Optional[float] = None
    """The divergence: 0 is the forward KL divergence of the teacher from the model, 1 the reverse KL divergence of the model from the teacher, and a number between them the generalized Jensen-Shannon divergence with this share of the teacher in the mixture."""
    temperature: Optional[float] = None
    """The temperature by which the logits of both models are divided."""
    lmbda: Optional[float] = None
    """The share of the steps whose completions the trained model draws (on-policy): their rows keep the prompts of the data, and the teacher reads what the model has drawn at `temperature` behind each prompt."""
    max_completion_length: Optional[int] = None
    """Tokens of a drawn completion at most; a completion also ends where its row ends."""
    teacher_recipe: Optional[Literal["auto", "fp32", "bf16", "fp16", "fp8-delayed", "fp8-current", "fp8-row", "fp8-block", "mxfp8", "nvfp4"]] = None
    """The recipe of the teacher's products: "auto" is the recipe of the run, or "fp8-current" if that is "fp8-delayed"."""


@dataclass
class Classification(Table):
    """Classification of texts."""
    problem_type: Optional[Literal["auto", "single_label_classification", "multi_label_classification", "regression"]] = None
    """The problem: "single_label_classification" (the cross entropy of one label), "multi_label_classification" (the binary cross entropy of each label, also for rerankers with one label) or "regression" (the squared error of numbers)."""
    num_labels: Optional[int] = None
    """Number of labels; 0 takes the number of label_names, or the labels of the model's folder, or 1 for a regression."""
    label_names: Optional[list[str]] = None
    """The names of the labels in the order of the scores, which `config.json` gets as id2label; [] takes the names of the model's folder, or LABEL_0, LABEL_1 and so on."""


@dataclass
class Embedding(Table):
    """Embeddings of texts."""
    pooling: Optional[Literal["auto", "mean", "last", "cls"]] = None
    """How the activations after the last norm become the embedding of a text: "mean", "last", or "cls" (the first token, for encoders)."""
    temperature: Optional[float] = None
    """The temperature by which cosines are divided; sentence-transformers has its reciprocal, scale."""
    negatives: Optional[int] = None
    """Number of negative texts of each record that are read; further negative texts of a record are left out."""
    gather_across_ranks: Optional[bool] = None
    """Whether the texts of all data ranks are negatives for each anchor, as with gather_across_devices of sentence-transformers; otherwise the texts of a micro-batch on one rank."""


@dataclass
class Training(Table):
    """Steps and batches."""
    max_steps: Optional[int] = None
    """Optimizer steps; without the key, the run takes the steps of num_train_epochs."""
    num_train_epochs: Optional[float] = None
    """Passes over the training documents."""
    per_device_train_batch_size: Optional[int] = None
    """Sequences per micro-batch, that is, per forward and backward pass."""
    gradient_accumulation_steps: Optional[int] = None
    """Micro-batches per optimizer step."""
    global_batch_size: Optional[int] = None
    """Sequences per optimizer step over all ranks; without the key, per_device_train_batch_size x gradient_accumulation_steps x ranks."""
    max_grad_norm: Optional[float] = None
    """Gradients are clipped to this global norm; 0 turns clipping off."""
    label_smoothing_factor: Optional[float] = None
    """Label smoothing e of the loss of texts, from 0 to less than 1."""
    neftune_noise_alpha: Optional[float] = None
    """Strength a of the noise that training adds to embeddings (NEFTune): uniform between plus and minus a / sqrt(L C) for sequences of L tokens and C channels."""


@dataclass
class Optimizer(Table):
    """The algorithm that updates weights, and the formats in which it stores them."""
    learning_rate: Optional[float] = None
    """Peak learning rate, reached after lr_scheduler.warmup_steps."""
    weight_decay: Optional[float] = None
    """Decoupled weight decay."""
    storage: Optional[Literal["float32", "msamp-o1", "msamp-o2", "msamp-o3", "coat", "bfloat16"]] = None
    """Formats of weights, gradients and optimizer states; docs/memory.md has the bytes per parameter."""
    master_weights: Optional[Literal["auto", "float32", "float16", "remainder", "none"]] = None
    """Master weights of models that compute in 16 bits: "float32", "float16" (with a scale), "remainder" (the 16 bits that complete bfloat16 weights to float32), "none" (updates are rounded stochastically), or "auto" (the format that storage selects)."""
    gradient_dtype: Optional[Literal["auto", "float32", "bfloat16", "float8"]] = None
    """Gradients of the blocks' matrices: "float32", "bfloat16" (if the model computes in bfloat16), "float8", or "auto" (the format that storage selects)."""
    state_dtype: Optional[Literal["auto", "float32", "bfloat16", "float8", "coat"]] = None
    """Moments of AdamW: "float32", "bfloat16", "float8" (E4M3 and float16), "coat" (both moments in 8 bits), or "auto" (the format that storage selects)."""
    name: Optional[Literal["adamw", "muon", "lion"]] = None
    """Selects the variant of this table."""
    beta1: Optional[float] = None
    """Decay rate of AdamW's first moment."""
    beta2: Optional[float] = None
    """Decay rate of AdamW's second moment."""
    eps: Optional[float] = None
    """A constant that is added to the denominator of AdamW's update."""
    momentum: Optional[float] = None
    """Decay rate of Muon's momentum."""
    adjust_lr_fn: Optional[Literal["match_rms_adamw", "original"]] = None
    """Factor of the learning rate in Muon's update of a matrix of R rows and C columns, named as in PyTorch: "match_rms_adamw" or "original"."""


@dataclass
class LrScheduler(Table):
    """The learning rate of each step."""
    warmup_steps: Optional[float] = None
    """Steps of linear warm-up at the start of the run: a number of steps, or a share of the run's steps (below 1, rounded up to whole steps)."""
    type: Optional[Literal["cosine", "linear", "constant", "warmup_stable_decay", "cosine_with_restarts", "polynomial", "inverse_sqrt"]] = None
    """Selects the variant of this table."""
    min_learning_rate: Optional[float] = None
    """Learning rate one step after the end of the schedule."""
    decay_steps: Optional[int] = None
    """Steps of linear decay at the end of the run."""
    num_cycles: Optional[int] = None
    """Half cosines, each from the peak to min_learning_rate."""
    power: Optional[float] = None
    """Exponent; 1.0 is a straight line."""


@dataclass
class Ema(Table):
    """The average of the weights."""
    decay: Optional[float] = None
    """The share of the average that stays when the weights of a step are added, such as 0.999; 0 keeps no average."""
    start: Optional[int] = None
    """The first step after which weights are added."""
    every: Optional[int] = None
    """Steps between two additions."""
    evaluate: Optional[bool] = None
    """Whether evaluations also compute the metrics of the average, as eval_ema_loss and so on."""


@dataclass
class Evaluation(Table):
    """Evaluations, the best checkpoint, and early stopping."""
    eval_steps: Optional[Union[Literal["end"], int]] = None
    """Steps between evaluations; "end" evaluates only at the start and the end."""
    per_device_eval_batch_size: Optional[int] = None
    """Sequences per batch of an evaluation, on each rank that has batches of its own; without the key, training.per_device_train_batch_size."""
    tasks: Optional[list[str]] = None
    """Files of tasks that each evaluation computes besides the validation loss, such as ["tasks/words.toml"] (docs/tasks.md)."""
    load_best_model_at_end: Optional[bool] = None
    """Whether each evaluation that is better than all earlier evaluations saves a checkpoint, whatever save_steps is."""
    metric_for_best_model: Optional[str] = None
    """The metric that decides which checkpoint is the best: eval_loss or eval_bits_per_byte, for the data set NAME eval_NAME_loss or eval_NAME_bits_per_byte, for a task eval_TASK_METRIC, or for a classifier eval_accuracy, eval_f1, eval_mse or eval_pearson."""
    early_stopping_patience: Optional[int] = None
    """The run ends after this many evaluations in a row without improvement; 0 turns early stopping off."""
    early_stopping_threshold: Optional[float] = None
    """An evaluation is an improvement if its metric is better than the best earlier value by more than this amount."""
    num_generations: Optional[int] = None
    """Completions that reinforcement learning draws of each held-out prompt, besides the most likely completion; with n completions, the evaluation reports eval_pass@k for each power of two k up to n."""
    pass_reward: Optional[float] = None
    """Smallest reward of a completion that passes: it counts in eval_accuracy and eval_pass@k."""


@dataclass
class Checkpoint(Table):
    """Checkpoints."""
    save_steps: Optional[Union[Literal["end"], int]] = None
    """Steps between checkpoints; "end" saves only at the end and when a signal stops the run."""
    save_minutes: Optional[float] = None
    """Minutes after which a checkpoint is saved although save_steps is not reached, for long steps; 0 saves by steps alone."""
    save_total_limit: Optional[int] = None
    """Number of newest checkpoints to keep; 0 keeps all checkpoints."""
    save_only_model: Optional[bool] = None
    """Whether checkpoints hold the model alone, without the states of the optimizer."""
    async_save: Optional[Union[Literal["auto"], bool]] = None
    """Whether training continues while a checkpoint is written from a copy in host memory (pinned memory for a GPU): true, false, or "auto" (true if the host has memory for the copy)."""
    upload_to: Optional[str] = None
    """A store that gets a copy of each checkpoint, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX; "" makes no copies."""


@dataclass
class Logging(Table):
    """What is logged, and how often."""
    logging_steps: Optional[int] = None
    """Steps between lines on the terminal."""
    cast_statistics_steps: Optional[int] = None
    """Steps between lines of casts.jsonl, the statistics of each FP8 cast that `ottava inspect` reads; 0 writes none."""
    completions: Optional[int] = None
    """Completions of each generation of reinforcement learning whose texts and rewards are written to completions.jsonl; 0 writes none."""
    report_to: Optional[list[Literal["mlflow", "trackio", "wandb", "tensorboard"]]] = None
    """Trackers that get metrics and settings while the run trains: "mlflow", "trackio", "wandb" (a file for `wandb sync`)."""
    project: Optional[str] = None
    """The project of the run in trackers; the experiment in MLflow."""
    run_name: Optional[str] = None
    """The name of the run in trackers; "" is the name of the folder output_dir."""
    report_files: Optional[list[str]] = None
    """Files in output_dir that MLflow gets at the end of the run."""


@dataclass
class Router(Table):
    """Load balance of mixtures of experts."""
    balance_loss: Optional[float] = None
    """Coefficient of the load-balancing loss of each mixture-of-experts layer (Megatron's `moe_aux_loss_coeff`; 0.01 is usual for training from scratch)."""
    z_loss: Optional[float] = None
    """Coefficient of the router z-loss: the squared log-sum-exp of a router's logits, averaged over tokens."""
    bias_update_rate: Optional[float] = None
    """Amount by which each step increases the bias of experts with fewer tokens than the mean, and decreases the bias of experts with more."""


@dataclass
class PrecisionAccumulation(Table):
    """How FP8 products add up on a GPU."""
    fprop_accumulation: Optional[Literal["auto", "fast", "exact"]] = None
    """Accumulation of FP8 products in fprop on a GPU: "fast", "exact", or "auto" ("exact" with scales per block, else "fast")."""
    dgrad_accumulation: Optional[Literal["auto", "fast", "exact"]] = None
    """Accumulation of FP8 products in dgrad on a GPU: "fast", "exact", or "auto" ("exact")."""
    wgrad_accumulation: Optional[Literal["auto", "fast", "exact"]] = None
    """Accumulation of FP8 products in wgrad on a GPU: "fast", "exact", or "auto"."""


@dataclass
class PrecisionExceptions(Table):
    """Linears, products and steps in BF16."""
    high_precision_products: Optional[list[Literal["fprop", "dgrad", "wgrad"]]] = None
    """Products that read BF16 operands in all linears: any of "fprop", "dgrad", "wgrad"."""
    high_precision_steps: Optional[str] = None
    """Steps that compute all products in BF16 and still update amax histories and scales: "100..200" means steps 100 to 199."""
    high_precision_layers: Optional[list[str]] = None
    """Linears that stay in BF16: patterns (* and ?) of the Hugging Face names of linears or of modules that contain them, such as "model.layers.0.*" or "*.down_proj"."""
    first_layers_bf16: Optional[int] = None
    """Blocks at the start whose linears stay in BF16."""
    last_layers_bf16: Optional[int] = None
    """Blocks at the end whose linears stay in BF16."""
    skip_slow_linears: Optional[bool] = None
    """On a GPU, keep linears in BF16 that FP8 would make slower at the micro-batch size of the run, by measurements on an H200."""


@dataclass
class PrecisionDelayed(Table):
    """Delayed scaling, for linears with recipe "fp8-delayed"."""
    amax_history_len: Optional[int] = None
    """Steps of amax history."""
    amax_compute_algo: Optional[Literal["max", "most_recent"]] = None
    """How the history is reduced, "max" or "most_recent"."""
    margin: Optional[int] = None
    """Headroom in powers of two."""
    interval: Optional[int] = None
    """Steps from one computation of a scale to the next."""
    non_finite: Optional[Literal["quarantine", "keep"]] = None
    """How an infinite amax is handled."""
    first_step: Optional[Literal["current", "unscaled"]] = None
    """Scales of the first step, "current" (from the tensor's own amax) or "unscaled" (1, as in Transformer Engine)."""


@dataclass
class PrecisionFp16(Table):
    """The loss scale of recipe "fp16"."""
    initial_loss_scale: Optional[float] = None
    """Initial loss scale of "fp16", a power of two."""
    loss_scale_window: Optional[int] = None
    """Consecutive steps with finite gradients after which the loss scale doubles."""
    min_loss_scale: Optional[float] = None
    """The loss scale is never halved below this power of two."""


@dataclass
class Precision(Table):
    """The formats of computation."""
    recipe: Optional[Literal["fp32", "bf16", "fp16", "fp8-delayed", "fp8-current", "fp8-row", "fp8-block", "mxfp8", "nvfp4"]] = None
    """"fp32", "bf16", "fp16" (with a loss scale), or an FP8 recipe, named by where its scales come from."""
    fp8_format: Optional[Literal["auto", "hybrid", "e4m3"]] = None
    """FP8 formats: "hybrid" (gradients in E5M2, everything else in E4M3), "e4m3" (everything in E4M3), or "auto" ("hybrid" with one scale per tensor, "e4m3" with scales per row or block)."""
    power_of_two_scales: Optional[bool] = None
    """Round scales down to powers of two."""
    accumulation: Optional[PrecisionAccumulation] = None
    wgrad_blocks: Optional[Literal["1x128", "128x128"]] = None
    """With "fp8-block": blocks of dy in wgrad, "128x128" (faster on a GPU) or "1x128" (as in DeepSeek-V3 and Transformer Engine)."""
    exceptions: Optional[PrecisionExceptions] = None
    smooth_swiglu: Optional[bool] = None
    """Smooth-SwiGLU, for "fp8-delayed" and "fp8-current": scale each input channel of down_proj by a power of two before the cast, and the weight by its inverse."""
    deterministic: Optional[bool] = None
    """On a GPU, give each run the same bits."""
    batch_invariant: Optional[bool] = None
    """Compute forward on a GPU so that the result of a token does not depend on the other tokens of a batch, with the order of sums of `--batch-invariant` in inference."""
    delayed: Optional[PrecisionDelayed] = None
    fp16: Optional[PrecisionFp16] = None
    overrides: Optional[list[dict[str, Any]]] = None
    """Other formats for some linears: tables `[[precision.overrides]]` with `layers`, patterns as in high_precision_layers, and at least one of `recipe`, `fp8_format` and `high_precision_products`."""


@dataclass
class Sentinel(Table):
    """Comparisons of the recipe with BF16."""
    sentinel_steps: Optional[int] = None
    """Steps between comparisons of the FP8 recipe with BF16, beginning with the first step; 0 never compares."""
    sentinel_sequences: Optional[int] = None
    """Number of sequences per data-parallel rank that a comparison reads, from the step's first micro-batch."""
    sentinel_policy: Optional[Literal["report", "pause", "demote", "bf16"]] = None
    """What happens after a finding: "report" (a warning), "pause" (save and end with exit code 76), "demote" (the linears with findings compute in BF16 for a while) or "bf16" (all linears compute in BF16 for a while)."""
    sentinel_hold_steps: Optional[int] = None
    """Number of steps for which "demote" and "bf16" hold."""
    sentinel_loss_gap: Optional[float] = None
    """The difference between the losses in FP8 and BF16, in nats per token, above which a comparison is a finding."""
    sentinel_cosine: Optional[float] = None
    """The cosine between the gradients in FP8 and BF16 below which a comparison is a finding."""
    sentinel_metric: Optional[str] = None
    """A metric that each evaluation computes both in FP8 and in BF16, with the same weights, such as eval_loss or eval_words_acc of the task words; "" computes none."""
    sentinel_metric_gap: Optional[float] = None
    """How much worse sentinel_metric may be in FP8 than in BF16; a larger difference is a finding."""
    sentinel_metric_return: Optional[float] = None
    """How much worse sentinel_metric may be in FP8 for a return to FP8, at most sentinel_metric_gap."""
    repeat_steps: Optional[int] = None
    """Steps between checks for unreliable hardware, beginning with the first step; 0 never checks."""


@dataclass
class AlarmsSpikes(Table):
    """Which losses and gradient norms are spikes."""
    spike_window: Optional[int] = None
    """Number of preceding steps with which the loss and gradient norm of a step are compared."""
    spike_threshold: Optional[float] = None
    """A loss or gradient norm is a spike if it exceeds the median of the preceding spike_window steps by more than this many robust standard deviations."""


@dataclass
class AlarmsCastBounds(Table):
    """Which statistics of casts raise an alarm."""
    saturated_share: Optional[float] = None
    """Share of saturated elements of a cast above which an alarm is raised."""
    underflowed_share: Optional[float] = None
    """Share of underflowed elements of a cast above which an alarm is raised."""
    amax_growth: Optional[float] = None
    """An alarm is raised if the amax of a cast exceeds the median of the amaxes in the last 50 lines of statistics by more than this many powers of two."""


@dataclass
class AlarmsRolloutBounds(Table):
    """Which metrics of completions raise an alarm."""
    max_mult_prob_error: Optional[float] = None
    """Largest token_mult_prob_error: how much the probabilities of tokens differ between draws and steps."""
    min_entropy: Optional[float] = None
    """Smallest entropy, in nats per token."""
    max_clipped_ratio: Optional[float] = None
    """Largest completions/clipped_ratio: the share of completions that reach max_completion_length."""
    max_zero_std_ratio: Optional[float] = None
    """Largest frac_reward_zero_std: the share of groups whose completions all have the same reward."""
    plateau_steps: Optional[int] = None
    """An alarm is raised if the mean reward of this many steps is not above the mean reward of as many steps before; 0 for no such alarm."""


@dataclass
class AlarmsRollback(Table):
    """What "rollback" does."""
    rollback_steps: Optional[int] = None
    """Minimum age, in steps, of the checkpoint that "rollback" restores."""
    max_rollbacks: Optional[int] = None
    """Maximum number of rollbacks of a run; the next alarm with "rollback" ends the run with exit code 77."""


@dataclass
class Alarms(Table):
    """Alarms about losses, gradients and casts."""
    loss_spike: Optional[Literal["off", "warn", "rollback", "pause", "stop"]] = None
    """Action after a spike of the loss: "off", "warn", "rollback" (restore an earlier checkpoint and continue with the next unread rows), "pause" (save and end with exit code 76) or "stop" (end with exit code 77, without a checkpoint)."""
    grad_norm_spike: Optional[Literal["off", "warn", "skip", "rollback", "pause", "stop"]] = None
    """Action after a spike of the gradient norm: an action of loss_spike, or "skip" (the step changes no weights)."""
    casts: Optional[Literal["off", "warn", "rollback", "pause", "stop"]] = None
    """Action if casts saturate or underflow, their amax grows, or their scale reaches a limit: "off", "warn", "rollback", "pause" or "stop"."""
    routers: Optional[Literal["off", "warn", "rollback", "pause", "stop"]] = None
    """Action if routers send almost all tokens to the same experts: "off", "warn", "rollback", "pause" or "stop"."""
    rollouts: Optional[Literal["off", "warn", "rollback", "pause", "stop"]] = None
    """Action if the completions of reinforcement learning show that the model learns nothing, or something else than it should: "off", "warn", "rollback", "pause" or "stop"."""
    spikes: Optional[AlarmsSpikes] = None
    non_finite_steps: Optional[Literal["stop", "skip"]] = None
    """Action if the gradient norm of a step is not finite: "stop" (end with exit code 4) or "skip" (continue with the next step)."""
    max_skipped_steps: Optional[int] = None
    """Maximum number of consecutive steps that are skipped."""
    cast_bounds: Optional[AlarmsCastBounds] = None
    collapsed_share: Optional[float] = None
    """Share of all choices above which a router has collapsed: with K experts per token, the choices of its K most chosen experts count."""
    rollout_bounds: Optional[AlarmsRolloutBounds] = None
    rollback: Optional[AlarmsRollback] = None


@dataclass
class Debug(Table):
    """The tensors whose statistics are recorded."""
    debug_steps: Optional[list[int]] = None
    """Steps before which statistics of tensors are written to tensors.jsonl: mean, standard deviation, norms, amax, mean squared error of the cast, dynamic range and a histogram of exponents."""
    debug_tensors: Optional[list[str]] = None
    """Patterns (*, ?) for names of tensors: "CAST" (the input of a cast, such as "*.down_proj.input"), "BLOCK.output", "BLOCK.grad_input" (such as "model.layers.0.grad_input") and "PARAMETER.gradient"."""
    dump_tensors: Optional[bool] = None
    """Also write the tensors to dumps/step-STEP.safetensors."""


@dataclass
class Memory(Table):
    """Recomputation and offloading."""
    recompute: Optional[Literal["auto", "none", "norm-swiglu", "attention", "full"]] = None
    """Activations that backward recomputes instead of reading saved ones: "none", "norm-swiglu" (outputs of norms, SwiGLU and attention), "attention" (also Q, K and V), "full" (everything but each block's input), or "auto" (the fastest of these policies that fits the device)."""
    weight_codes: Optional[Union[Literal["auto"], bool]] = None
    """Whether FP8 codes of weights are kept for the whole step: true, false (each product casts the weight that it reads), or "auto" (the default of optimizer.storage; with adapters, true)."""
    saved_activations: Optional[Literal["exact", "float8"]] = None
    """How inputs of norms and SwiGLU are saved for backward: "exact", or "float8" (E4M3 with a power of two per 16 values)."""
    offload_optimizer: Optional[Union[Literal["auto"], float]] = None
    """Fraction of the blocks, from the last one, that keep moments and master weights in host memory: 0 to 1, or "auto" (the smallest fraction that fits)."""
    offload_parameters: Optional[Union[Literal["auto"], float]] = None
    """Share of the blocks whose weights are offloaded, and prefetched one block ahead: 0 to 1, or "auto" (the smallest share that fits, if offloading the optimizer is not enough)."""
    offload_residuals: Optional[bool] = None
    """Whether the inputs of blocks are offloaded between forward and backward."""


@dataclass
class ParallelCommunication(Table):
    """How ranks communicate."""
    reduce_dtype: Optional[Literal["auto", "float32", "bfloat16", "float8"]] = None
    """Type in which ranks send gradients of matrices: "auto" is the type of `optimizer.gradient_dtype`."""
    activation_dtype: Optional[Literal["auto", "float8"]] = None
    """Type in which pipeline ranks send activations and their gradients to each other, and in which tensor- and expert-parallel ranks send partial sums."""
    error_feedback: Optional[bool] = None
    """Whether each rank adds the cast error of the sent gradients to the gradients that it sends next."""
    join_timeout: Optional[int] = None
    """Seconds within which all ranks must join."""
    silence_timeout: Optional[int] = None
    """Seconds without any message from a rank's process, not even a heartbeat, after which the rank counts as lost."""
    collective_timeout: Optional[int] = None
    """Seconds that ranks wait in a collective for a live rank before the job ends."""


@dataclass
class Parallel(Table):
    """The division of work and memory among ranks."""
    auto: Optional[bool] = None
    """Whether a search chooses `data`, `tensor`, `pipeline`, `context`, `expert` and `zero`: the fastest division that fits in memory, predicted by dry runs and a cost model (docs/parallelism.md)."""
    data: Optional[int] = None
    """Data-parallel ranks, which divide the rows of a step; 0 means the number of all ranks divided by the sizes of the axes tensor, pipeline and context."""
    tensor: Optional[int] = None
    """Tensor-parallel ranks."""
    pipeline: Optional[int] = None
    """Pipeline-parallel ranks, which divide the layers into stages balanced by estimated time."""
    pipeline_schedule: Optional[Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]] = None
    """Order of forward and backward passes in a pipeline: "1f1b", "gpipe", "interleaved" or "zero-bubble" (docs/parallelism.md)."""
    pipeline_stages: Optional[int] = None
    """Stages per pipeline rank: 1, or 2 or more with "interleaved"."""
    context: Optional[int] = None
    """Context-parallel ranks, which divide the tokens of a row."""
    expert: Optional[int] = None
    """Expert-parallel ranks, which divide the experts of each layer and exchange tokens."""
    zero: Optional[int] = None
    """ZeRO stage, which selects what is divided among ranks: 0 nothing, 1 master weights and optimizer states, 2 also gradients accumulated over micro-batches, 3 also weights and their FP8 codes."""
    zero_shard_size: Optional[int] = None
    """Ranks that divide with `zero`, such as the ranks of a host; 0 means all ranks of data x context."""
    check_replicas: Optional[int] = None
    """Steps between comparisons of replicas."""
    straggler_steps: Optional[int] = None
    """Steps between searches for slow ranks; 0 turns them off."""
    straggler_ratio: Optional[float] = None
    """The time of a slow rank's products, divided by the median of all ranks."""
    communication: Optional[ParallelCommunication] = None


@dataclass
class Recovery(Table):
    """Snapshots in the memory of hosts, from which a job goes on after it has lost a rank or a host."""
    snapshot_steps: Optional[int] = None
    """Steps between two snapshots; 0 takes no snapshots, and the job ends if it loses a rank."""
    spares: Optional[int] = None
    """The number of hosts that the launcher starts beyond the hosts that train."""
    min_hosts: Optional[int] = None
    """The smallest number of hosts with which the job goes on after a loss, if no spare host is left; 0 means all hosts that train."""
    stragglers: Optional[Literal["warn", "swap"]] = None
    """What happens to the host of a slow rank (`parallel.straggler_steps`): "warn" names it; "swap" also gives its place to a spare host after the next snapshot, if there is a spare host that is not slow."""
    memory_dir: Optional[str] = None
    """Folder of a memory file system for the snapshots, on each host."""
    max_recoveries: Optional[int] = None
    """Number of recoveries without a new snapshot or checkpoint after which the job ends."""
    silence_timeout: Optional[int] = None
    """Seconds without any message from a host, not even a heartbeat, after which the host counts as lost."""
    host_timeout: Optional[int] = None
    """Seconds that the job waits for missing hosts, at its start and after a loss."""
    start_timeout: Optional[int] = None
    """Seconds within which hosts must fetch snapshots, and within which ranks must start and load their state."""


@dataclass
class Generation(Table):
    """Samples that are generated at the end of the run."""
    prompts: Optional[list[str]] = None
    """Prompts that the trained model completes at the end of the run, for samples.jsonl."""
    at_evaluations: Optional[bool] = None
    """Complete the prompts at each evaluation of the run too."""
    max_new_tokens: Optional[int] = None
    """Maximum number of new tokens per completion."""
    temperature: Optional[float] = None
    """Sampling temperature; 0 always takes the most likely token."""
    top_p: Optional[float] = None
    """Samples only from the most likely tokens that together have this probability; above 0, at most 1."""


@dataclass
class Run(Table):
    """The settings of a training run."""
    output_dir: Optional[str] = None
    """Folder of the run: resolved configuration, metrics, plot and checkpoints."""
    device: Optional[Literal["auto", "cuda", "cpu"]] = None
    """The device to run on: "auto" (a GPU if there is one), "cuda" or "cpu"."""
    seed: Optional[int] = None
    """Seed of random initial weights, of the order of the data, and of samples after the run."""
    model: Optional[Model] = None
    tokenizer: Optional[Tokenizer] = None
    lora: Optional[Lora] = None
    data: Optional[Data] = None
    preference: Optional[Preference] = None
    reinforcement: Optional[Reinforcement] = None
    distillation: Optional[Distillation] = None
    classification: Optional[Classification] = None
    embedding: Optional[Embedding] = None
    training: Optional[Training] = None
    optimizer: Optional[Optimizer] = None
    lr_scheduler: Optional[LrScheduler] = None
    ema: Optional[Ema] = None
    evaluation: Optional[Evaluation] = None
    checkpoint: Optional[Checkpoint] = None
    logging: Optional[Logging] = None
    router: Optional[Router] = None
    precision: Optional[Precision] = None
    sentinel: Optional[Sentinel] = None
    alarms: Optional[Alarms] = None
    debug: Optional[Debug] = None
    memory: Optional[Memory] = None
    parallel: Optional[Parallel] = None
    recovery: Optional[Recovery] = None
    generation: Optional[Generation] = None
