#!/usr/bin/env python3
"""Compares adapters with PEFT: every key of every `adapter_config.json` that PEFT writes, with a value that is not its default.

usage: check_adapters.py OTTAVA_BINARY [--record FILE]

The base is a tiny model with seeded weights. PEFT loads each adapter; `ottava eval --adapter` and `ottava merge` must have PEFT's loss within 1e-5, or
refuse the adapter with an error that names the key. `--record` writes the adapters that are right, with their losses, for the test
`promises::adapter_keys`.
"""

import argparse
import dataclasses
import enum
import json
import logging
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import peft
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from safetensors.torch import load_file, save_file

from check_configs import error_of, loss_of, referee
from common import TEXT, TOLERANCE, Program, Tally, ids_of, in_parallel, message, seeded, write_recording, write_tokenizer
from configs import FAMILIES

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
BASE = dict(r=4, lora_alpha=10, target_modules=PROJECTIONS, task_type="CAUSAL_LM", init_lora_weights=False)

# Adapters that PEFT makes: the arguments of `LoraConfig`.
MADE = {
    "r": [1, 3, 16],
    "lora_alpha": [1, 0.5, 64],
    "target_modules": [
        "all-linear",
        ["q_proj"],
        ["self_attn.q_proj", "down_proj"],
        ["model.layers.1.mlp.up_proj"],
        r".*\.(q|v)_proj",
        r".*layers\.0\..*_proj",
        r"model\.layers\.\d+\.self_attn\.[qkvo]_proj",
        ["q_proj", "lm_head"],
        ["embed_tokens", "q_proj"],
        ["lm_head"],
        ["layers.1.self_attn.k_proj"],
    ],
    "exclude_modules": [["o_proj"], ["lm_head"], r".*layers\.0.*", ["layers.1.mlp.up_proj"]],
    "lora_dropout": [0.3],
    "bias": ["all", "lora_only"],
    "use_rslora": [True],
    "use_dora": [True],
    "modules_to_save": [["lm_head"], ["embed_tokens"], ["input_layernorm"]],
    "layers_to_transform": [[1], 0, [0, 1]],
    "layers_pattern": ["layers", ["layers"]],
    "rank_pattern": [{"q_proj": 2}, {r"layers\.1\..*": 3}, {"^model.layers.0.self_attn.q_proj": 8}, {"unused": 2}],
    "alpha_pattern": [{"q_proj": 3}, {r"model\.layers\.0\.mlp\.up_proj": 20, "down_proj": 1}],
    "trainable_token_indices": [[1, 2], {"embed_tokens": [3]}],
    "layer_replication": [[[0, 2], [1, 2]]],
    "lora_bias": [True],
    "target_parameters": [["mlp.up_proj.weight"], ["self_attn.q_proj.weight"]],
    "alora_invocation_tokens": [[1, 6]],
    "init_lora_weights": [True, False, "gaussian", "olora", "pissa", "pissa_niter_4", "orthogonal"],
    "fan_in_fan_out": [True],
    "ensure_weight_tying": [True],
    "use_qalora": [True],
    "use_dora, use_rslora": [(True, True)],
    "layers_to_transform, layers_pattern": [([1], "layers"), ([0], ["layers"])],
    "rank_pattern, alpha_pattern": [({"q_proj": 2, "v_proj": 7}, {"q_proj": 3})],
    "rank_pattern, use_rslora": [({"q_proj": 2}, True)],
    "target_modules, exclude_modules": [(r".*_proj", ["k_proj"]), ("all-linear", r".*mlp.*")],
    "target_modules, layers_to_transform": [("all-linear", [1]), (["q_proj", "up_proj"], [0])],
}
# Adapters whose file is changed afterwards, to what PEFT of another version or another tool may have written.
WRITTEN = {
    "peft_version": ["0.5.0", None],
    "revision": ["main"],
    "base_model_name_or_path": ["some/model", None],
    "inference_mode": [False],
    "task_type": [None, "FEATURE_EXTRACTION"],
    "auto_mapping": [{"base_model_class": "LlamaForCausalLM", "parent_library": "transformers.models.llama.modeling_llama"}],
    "megatron_config": [{"tensor_model_parallel_size": 2}],
    "megatron_core": ["other.core"],
    "qalora_group_size": [8],
    "loftq_config": [{"loftq_bits": 4}],
    "eva_config": [{"rho": 2.0}],
    "corda_config": [{"corda_method": "kpm"}],
    "lora_ga_config": [{"direction": "ArB2r"}],
    "velora_config": [{"rank": 1}],
    "monteclora_config": [{"monteclora_n": 2}],
    "use_bdlora": [{"nblocks": 2}],
    "arrow_config": [{"top_k": 1}],
    "kasa_config": [{"beta": 0.1}],
    "runtime_config": [{"ephemeral_gpu_offload": True}],
    "init_lora_weights": ["pissa", "olora", "eva", "corda", "loftq", "lora_ga", "orthogonal", "gaussian", "mica", False, None],
    "use_dora": [None],
    "use_rslora": [None, True],
    "bias": [None],
    "lora_alpha": [16.0, 5],
    "rank_pattern": [None, {}],
    "alpha_pattern": [None, {"q_proj": 40}],
    "target_modules": [["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "missing_proj"], "all-linear"],
    "exclude_modules": [None, ["lm_head"]],
    "layers_to_transform": [None],
    "layers_pattern": [None, []],
    "modules_to_save": [None, []],
    "lora_bias": [None],
    "target_parameters": [None, []],
    "trainable_token_indices": [None],
    "an_unknown_key": [True, {"a": 1}, False, None],
    "peft_type": ["lora", None],
}
# Adapters of each family: the arguments of `LoraConfig`.
OF_FAMILIES = [
    dict(target_modules="all-linear"),
    dict(target_modules=r".*(q_proj|kv_b_proj|qkv_proj|c_attn|down_proj|mlp\.c_proj)", use_rslora=True),
    dict(target_modules=r".*layers?\.1\..*(o_proj|up_proj)|.*h\.1\..*c_fc", use_dora=True),
    dict(target_modules=["o_proj", "c_proj", "gate_up_proj"]),
    dict(target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj", "mlp.gate.weight", "router.weight"]),
    dict(target_modules=["o_proj"], target_parameters=["experts.down_proj"], rank_pattern={"down_proj": 3}, use_rslora=True),
]
# Keys of `LoraConfig` without a case of their own, with the reason.
UNTRIED = {}
# Why the program may refuse an adapter that PEFT loads, by a pattern of its error; errors that name the key are always right.
REFUSALS = {
    r"`(lm_head|embed_tokens)` is no linear|(lm_head|embed_tokens)\.(base_layer|lora_)": "with adapters of the embedding or the head",
    r"shared_expert(_gate)?\.": "with adapters of a shared expert with a gate",
}


def case_keys(table):
    for key, values in table.items():
        names = key.split(", ")
        for value in values:
            yield dict(zip(names, value)) if len(names) > 1 else {key: value}


class Case:
    """An adapter in a folder of its own; `keys` are those that are tried."""

    def __init__(self, root, number, keys):
        self.keys, self.folder, self.merged_folder = keys, root / f"adapter-{number}", root / f"merged-{number}"
        self.expected, self.error = None, None

    def __str__(self):
        return json.dumps(self.keys, default=str)

    def save(self, load_base, **arguments):
        """An adapter as PEFT writes it, with seeded values."""
        model = get_peft_model(load_base(), LoraConfig(**(BASE | arguments)))
        model.save_pretrained(self.folder)
        self.fill()

    def fill(self):
        file = self.folder / "adapter_model.safetensors"
        self.shapes = {name: list(tensor.shape) for name, tensor in load_file(file).items()}
        save_file({name: torch.from_numpy(seeded(name, shape).copy()) for name, shape in self.shapes.items()}, file, {"format": "pt"})

    def change(self, keys):
        file = self.folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | keys))

    def load(self, load_base):
        """The loss by PEFT."""
        try:
            model = PeftModel.from_pretrained(load_base(), self.folder).eval()
            self.expected = loss_of(model, ids_of(TEXT, 0))
        except Exception as error:
            self.error = error_of(error)

    def evaluate(self, program, base):
        """The losses with the adapter beside the model and merged, or errors."""
        self.beside = program.evaluate(base, base / "text.txt", "--adapter", self.folder)
        status, _, error = program.run("merge", base, self.folder, self.merged_folder)
        self.merged = program.evaluate(self.merged_folder, base / "text.txt") if status == 0 else message(error)
        shutil.rmtree(self.merged_folder, ignore_errors=True)
        return self


def judge(name, case, tally):
    """Compares both ways, and returns whether the adapter is right beside the model."""
    right = []
    for way, ours in (("eval", case.beside), ("merge", case.merged)):
        named, failed = f"{way} {name}", len(tally.failures)
        if isinstance(ours, str):
            if case.expected is None or any(f"`{key}`" in ours for key in case.keys):
                tally.expect("refused by the key's name" if case.expected else "refused by both")
            else:
                tally.refuse(named, f"{ours}; PEFT {case.expected:.6f}")
        elif case.expected is None and None in case.keys.values():
            tally.expect("a null that PEFT cannot read and Ottava reads as the default")
        elif case.expected is None:
            tally.fail(named, f"PEFT cannot load the adapter ({case.error}), and Ottava has the loss {ours['loss']:.6f}")
        elif abs(ours["loss"] - case.expected) <= TOLERANCE * max(1.0, case.expected):
            tally.hold()
        else:
            tally.fail(named, f"loss {ours['loss']:.6f}, PEFT {case.expected:.6f}")
        right.append(len(tally.failures) == failed)
    return right[0] and (case.expected is not None or isinstance(case.beside, str))


def make_base(root, family, changes):
    folder = root / "base"
    folder.mkdir()
    architecture, config = FAMILIES[family]
    (folder / "config.json").write_text(json.dumps(dict(model_type=family, architectures=[architecture]) | config | changes))
    write_tokenizer(folder)
    (folder / "text.txt").write_text(TEXT)
    referee(folder)

    def load():
        fresh = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
        return fresh.eval()

    return folder, load


def cases_of_lora(root, load):
    number = 0
    for keys in case_keys(MADE):
        case = Case(root, number, keys)
        number += 1
        try:
            case.save(load, **keys)
        except Exception as error:
            print(f"PEFT makes no adapter of {case}: {error_of(error)}")
            continue
        case.load(load)
        yield case
    for keys in case_keys(WRITTEN):
        case = Case(root, number, keys)
        number += 1
        case.save(load)
        case.change(keys)
        case.load(load)
        yield case


def cases_of_family(root, load):
    for number, keys in enumerate(OF_FAMILIES):
        case = Case(root, number, keys)
        try:
            case.save(load, **keys)
        except Exception as error:
            print(f"PEFT makes no adapter of {case}: {error_of(error)}")
            continue
        case.load(load)
        yield case


def cases_of_others(root, load):
    """The default settings of each other kind of adapter, with the weights of a LoRA."""
    for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items():
        if kind.value == "LORA":
            continue
        case = Case(root, kind.value, {"peft_type": kind.value})
        case.save(load)
        fields = {f.name: f.default for f in dataclasses.fields(config) if f.default is not dataclasses.MISSING}
        fields = {k: v.value if isinstance(v, enum.Enum) else v for k, v in fields.items()}
        case.change(json.loads(json.dumps(fields, default=str)) | dict(peft_type=kind.value, target_modules=PROJECTIONS))
        yield case


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity(logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    program, tally = Program(arguments.binary), Tally(f"adapters of peft {peft.__version__}", REFUSALS)
    recorded = []
    tried = {key for table in (MADE, WRITTEN) for keys in case_keys(table) for key in keys}
    for field in dataclasses.fields(LoraConfig):
        if field.name not in tried and field.name not in UNTRIED:
            tally.fail(field.name, "the key is new in LoraConfig and has no case")
    suites = [("llama", dict(attention_bias=True), cases_of_lora), ("llama", {}, cases_of_others)]
    suites += [(family, {}, cases_of_family) for family in FAMILIES]
    for family, changes, cases in suites:
        with tempfile.TemporaryDirectory() as root:
            base, load = make_base(Path(root), family, changes)
            for case in in_parallel(lambda case: case.evaluate(program, base), cases(Path(root), load)):
                if judge(f"{family} {case}", case, tally):
                    adapter = json.loads((case.folder / "adapter_config.json").read_text())
                    entry = dict(name=f"{family} {case}", base=json.loads((base / "config.json").read_text()), adapter=adapter)
                    recorded.append(entry | dict(shapes=case.shapes, ids=ids_of(TEXT, 0), loss=case.expected, refused=isinstance(case.beside, str)))
                shutil.rmtree(case.folder)
    if arguments.record:
        write_recording(arguments.record, recorded)
    return tally.report()


if __name__ == "__main__":
    sys.exit(main())
