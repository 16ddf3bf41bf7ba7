#!/usr/bin/env python3
"""Records what TRL computes for preferences on a small model, in crates/ottava-train/tests/data/referee_preference.safetensors, and for a reward
model, in referee_reward.safetensors beside it, and for losses without a reference model, in referee_free.safetensors.

Development only; the program itself needs no Python.
`pip install torch==2.15.0 transformers==5.24.0 trl==1.16.0 safetensors==0.8.0 numpy`. Runs on the CPU in ten minutes; arguments such as `free`
record these files alone.
"""

import sys
import tempfile

import torch
import transformers
import trl
from datasets import Dataset
from safetensors.torch import save_file
from torch.utils.data import SequentialSampler
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer

from make_referee import FOLDER, SIZES, VOCABULARY

STEPS, PAIRS = 20, 4
# By the name of the run: the options of its loss.
RUNS = {
    "sigmoid": {"beta": 0.5},
    "robust": {"beta": 0.5, "loss_type": ["robust"], "label_smoothing": 0.2},
    "hinge": {"beta": 0.5, "loss_type": ["hinge"]},
    "ipo": {"beta": 0.5, "loss_type": ["ipo"]},
    "sigmoid_norm": {"beta": 0.5, "loss_type": ["sigmoid_norm"]},
    "exo_pair": {"beta": 0.5, "loss_type": ["exo_pair"], "label_smoothing": 0.01},
    "nca_pair": {"beta": 0.5, "loss_type": ["nca_pair"]},
    "bco_pair": {"beta": 0.5, "loss_type": ["bco_pair"]},
    "sppo_hard": {"beta": 0.5, "loss_type": ["sppo_hard"]},
    "aot": {"beta": 0.5, "loss_type": ["aot"], "label_smoothing": 0.1},
    "aot_unpaired": {"beta": 0.5, "loss_type": ["aot_unpaired"]},
    "apo_zero": {"beta": 0.5, "loss_type": ["apo_zero"]},
    "apo_down": {"beta": 0.5, "loss_type": ["apo_down"]},
    "discopop": {"beta": 0.5, "loss_type": ["discopop"], "discopop_tau": 0.2},
    "sft": {"beta": 0.5, "loss_type": ["sft"]},
    "sum": {"beta": 0.5, "loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 0.5]},
    "kto": {"beta": 0.5, "desirable_weight": 1.5, "undesirable_weight": 0.5},
    "apo_zero_unpaired": {
        "beta": 0.5, "loss_type": "apo_zero_unpaired", "desirable_weight": 1.5, "undesirable_weight": 0.5,
    },
}  # fmt: skip
# Losses that compare all pairs of a micro-batch, also recorded with two micro-batches of half a batch.
ACCUMULATED = ["aot", "aot_unpaired", "sft"]
RUNS |= {f"{name}/accumulated": RUNS[name] | {"gradient_accumulation_steps": 2} for name in ACCUMULATED}
LABELS = ["kto", "apo_zero_unpaired"]
METRICS = ["loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected", "kl"]
# The same of losses without a reference model. TRL's loss of ORPO has the likelihood of the prompt too, so its prompts have one token here.
FREE_RUNS = {
    "cpo": {"beta": 0.5, "cpo_alpha": 0.7, "label_smoothing": 0.1},
    "cpo_hinge": {"beta": 0.5, "loss_type": "hinge", "cpo_alpha": 0.7},
    "cpo_ipo": {"beta": 0.5, "loss_type": "ipo", "cpo_alpha": 0.7},
    "simpo": {"beta": 2.0, "loss_type": "simpo", "simpo_gamma": 1.0, "cpo_alpha": 0.0},
    "simpo_sft": {"beta": 2.0, "loss_type": "simpo", "simpo_gamma": 0.5, "cpo_alpha": 1.0, "label_smoothing": 0.1},
    "orpo": {"beta": 0.5},
}
FREE_METRICS = METRICS[:-1] + ["rewards/accuracies", "nll_loss", "log_odds_ratio", "log_odds_chosen", "grad_norm"]
# The same of reward models; "margins" has data with margins.
REWARD_RUNS = {"plain": {}, "centered": {"center_rewards_coefficient": 0.1}, "margins": {}}
REWARD_METRICS = ["loss", "accuracy", "margin", "mean_reward", "min_reward", "max_reward"]


class AsGiven:
    """A trainer that takes records of ids as they are, in their order."""

    def _prepare_dataset(self, dataset, *args, **kwargs):
        return dataset

    def _get_train_sampler(self, dataset=None):
        return SequentialSampler(self.train_dataset)


class Dpo(AsGiven, DPOTrainer):
    pass


class Kto(AsGiven, KTOTrainer):
    pass


class Reward(AsGiven, RewardTrainer):
    pass


class IdsAsText(AsGiven):
    """A trainer that tokenizes texts of ids."""

    def tokenize_row(self, row, model=None):
        prompt, *completions = ([int(token) for token in row[key].split()] for key in ["prompt", "chosen", "rejected"])
        batch = {"prompt_input_ids": prompt, "prompt_attention_mask": [1] * len(prompt)}
        for name, completion in zip(["chosen", "rejected"], completions):
            ids = prompt + completion
            batch |= {f"{name}_input_ids": ids, f"{name}_attention_mask": [1] * len(ids)}
            batch[f"{name}_labels"] = [-100] * len(prompt) + completion
        return batch


class Cpo(IdsAsText, CPOTrainer):
    pass


class Orpo(IdsAsText, ORPOTrainer):
    pass


def tokenizer():
    from tokenizers import Tokenizer, models

    words = {f"w{i}": i for i in range(VOCABULARY)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), eos_token="w1", pad_token="w1"
    )


def pairs():
    """A chosen completion goes on as the prompt does, a rejected one does not. No token is that of the end or of padding."""
    generator = torch.Generator().manual_seed(20)
    draw = lambda low, high: int(torch.randint(low, high, (1,), generator=generator))
    after = lambda token: 2 + (5 * token + 7) % (VOCABULARY - 2)
    records = []
    for _ in range(PAIRS * STEPS):
        token = draw(2, VOCABULARY)
        prompt = [token := after(token) for _ in range(draw(2, 6))]
        chosen = [token := after(token) for _ in range(draw(2, 8))]
        rejected = [draw(2, VOCABULARY) for _ in range(draw(2, 8))]
        records.append({"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected})
    return records


def completions(pairs):
    """The records of KTO: in a batch, the divergence is that of prompts with the completion of the record before."""
    records = []
    for i, pair in enumerate(pairs):
        label = i % 3 != 1
        ids = pair["chosen_ids" if label else "rejected_ids"]
        records.append({"prompt_ids": pair["prompt_ids"], "completion_ids": ids, "label": label})
    for start in range(0, len(records), PAIRS):
        batch = records[start : start + PAIRS]
        for i, record in enumerate(batch):
            record["KL_completion_ids"] = batch[i - 1]["completion_ids"]
    return records


def config_of(architecture, **more):
    sizes = {**SIZES, "hidden_size": 32, "intermediate_size": 56}
    config = LlamaConfig(num_hidden_layers=2, tie_word_embeddings=False, **sizes, **more)
    config.architectures = [architecture]
    return config


def train(trainer, arguments, model, records, **options):
    """The logs of the steps."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = arguments(
            output_dir=folder, max_steps=STEPS, per_device_train_batch_size=PAIRS // options.get("gradient_accumulation_steps", 1),
            learning_rate=1e-3,
            lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, max_grad_norm=1.0,
            logging_steps=1, report_to="none", save_strategy="no", use_cpu=True, bf16=False,
            gradient_checkpointing=False, disable_tqdm=True, **({"max_length": None} | options),
        )  # fmt: skip
        run = trainer(
            model=model, args=arguments, train_dataset=Dataset.from_list(records), processing_class=tokenizer()
        )
        run.train()
    return [log for log in run.state.log_history if "loss" in log]


def weights_of(model):
    return {f"weights/{n}": p.detach().clone() for n, p in model.named_parameters()}


def ids_of(data):
    """Every list of ids with its length before it, 16 numbers for each."""
    padded = lambda ids: [len(ids)] + ids + [0] * (15 - len(ids))
    keys = ["prompt_ids", "chosen_ids", "rejected_ids"]
    return torch.tensor([[padded(pair[key]) for key in keys] for pair in data], dtype=torch.int32)


def save(name, tensors, config):
    metadata = {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}
    save_file(tensors, FOLDER / f"{name}.safetensors", metadata | {"config": config.to_json_string(use_diff=False)})


def add_metrics(tensors, name, metrics, steps):
    for metric in metrics:
        tensors[f"{name}/{metric}"] = torch.tensor([log.get(metric, float("nan")) for log in steps])
    print(f"{name}: loss {steps[0]['loss']:.4f} to {steps[-1]['loss']:.4f}")


def record():
    config = config_of("LlamaForCausalLM")
    data, tensors = pairs(), {}
    for name, options in RUNS.items():
        torch.manual_seed(19)
        model = LlamaForCausalLM._from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        weights = weights_of(model)
        trainer, arguments, records = (Kto, KTOConfig, completions(data)) if name in LABELS else (Dpo, DPOConfig, data)
        steps = train(trainer, arguments, model, records, precompute_ref_log_probs=True, **options)
        add_metrics(tensors, name, METRICS if name in LABELS else METRICS[:-1], steps)
    save("referee_preference", tensors | weights | {"ids": ids_of(data)}, config)


def record_free():
    config = config_of("LlamaForCausalLM")
    data, tensors = pairs(), {}
    text = lambda ids: " ".join(map(str, ids))
    for name, options in FREE_RUNS.items():
        torch.manual_seed(19)
        model = LlamaForCausalLM._from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        trainer, arguments = (Orpo, ORPOConfig) if name == "orpo" else (Cpo, CPOConfig)
        records = []
        for pair in data:
            of_prompt = 1 if name == "orpo" else len(pair["prompt_ids"])
            prompt, rest = pair["prompt_ids"][:of_prompt], pair["prompt_ids"][of_prompt:]
            chosen, rejected = (rest + pair[key] for key in ["chosen_ids", "rejected_ids"])
            records.append({"prompt": text(prompt), "chosen": text(chosen), "rejected": text(rejected)})
        add_metrics(tensors, name, FREE_METRICS, train(trainer, arguments, model, records, max_length=64, **options))
    save("referee_free", tensors, config)


def record_rewards():
    # As transformers writes it: one label, and the padding token.
    config = config_of("LlamaForSequenceClassification", num_labels=1, pad_token_id=1)
    data, tensors = pairs(), {}
    margins = [0.25 * (i % 3) for i in range(len(data))]
    sequences = lambda pair, key: {f"{key}_ids": pair["prompt_ids"] + pair[f"{key}_ids"]}
    for name, options in REWARD_RUNS.items():
        torch.manual_seed(19)
        model = LlamaForSequenceClassification._from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        weights = weights_of(model)
        records = [sequences(pair, "chosen") | sequences(pair, "rejected") for pair in data]
        if name == "margins":
            records = [record | {"margin": margin} for record, margin in zip(records, margins)]
        add_metrics(tensors, name, REWARD_METRICS, train(Reward, RewardConfig, model, records, **options))
    save("referee_reward", tensors | weights | {"ids": ids_of(data), "margins": torch.tensor(margins)}, config)


RECORDS = {"preference": record, "reward": record_rewards, "free": record_free}
for chosen in sys.argv[1:] or RECORDS:
    RECORDS[chosen]()
