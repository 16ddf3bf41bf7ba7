"""A server of a tiny model with random weights, for scripts that test `ottava serve`."""

import collections
import contextlib
import json
import random
import shutil
import struct
import subprocess
import tempfile
import threading
from pathlib import Path

root = Path(__file__).resolve().parent.parent
KEY, MODEL = "secret", "model"
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}{{ m.role }}: {% if m.reasoning_content %}<think>"
    "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %} "
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% if enable_thinking %}<think>"
    "{% endif %}{% endif %}"
)


def write_weights(path, shapes, numbers):
    """Writes tensors of random numbers in BF16; vectors are ones. `shapes` has the shape and the standard deviation of each tensor."""
    header, data = {}, bytearray()
    for name, (shape, deviation) in shapes.items():
        count = shape[0] * (shape[1] if len(shape) == 2 else 1)
        values = [1.0 if len(shape) == 1 else numbers.gauss(0, deviation) for _ in range(count)]
        begin = len(data)
        data += b"".join(struct.pack("<f", value)[2:] for value in values)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_adapter(folder, seed):
    """A PEFT adapter of the model of `write_model`, with random numbers."""
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": "model"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    shapes = {}
    for layer in range(2):
        for name, outputs in {"q_proj": 32, "v_proj": 16}.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            shapes |= {f"{name}.lora_A.weight": ((4, 32), 0.3), f"{name}.lora_B.weight": ((outputs, 4), 0.3)}
    write_weights(folder / "adapter_model.safetensors", shapes, random.Random(seed))


def write_model(folder):
    """A Llama of two layers whose weights are random numbers in BF16."""
    channels, hidden, vocabulary = 32, 64, 4096
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocabulary, "hidden_size": channels, "intermediate_size": hidden,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    for file in (root / "data/tokenizer").iterdir():
        shutil.copy(file, folder / file.name)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    shapes = {"model.embed_tokens.weight": (vocabulary, channels), "model.norm.weight": (channels,)}
    for layer in range(2):
        name = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{name}.{norm}.weight"] = (channels,)
        for matrix, shape in {
            "self_attn.q_proj": (channels, channels), "self_attn.k_proj": (16, channels), "self_attn.v_proj": (16, channels),
            "self_attn.o_proj": (channels, channels), "mlp.gate_proj": (hidden, channels), "mlp.up_proj": (hidden, channels),
            "mlp.down_proj": (channels, hidden),
        }.items():
            shapes[f"{name}.{matrix}.weight"] = shape
    write_weights(folder / "model.safetensors", {name: (shape, 0.2) for name, shape in shapes.items()}, random.Random(1))


@contextlib.contextmanager
def running(binary, *options):
    """Serves the model with these further options. Gives the URL of the server and the id of its process."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        command = [binary, "serve", folder, "--port", "0", "--device", "cpu", "--api-key", KEY, "--served-model-name", MODEL, *options]
        server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            lines = (line for line in server.stderr if " at http://" in line)
            url = "http://" + next(lines).strip().split("http://")[1]
            # A server whose log is not read would wait once the pipe is full.
            threading.Thread(target=collections.deque, args=(server.stderr, 0), daemon=True).start()
            yield url, server.pid
        finally:
            server.terminate()
            server.wait()


@contextlib.contextmanager
def serving(binary, *options):
    """Serves the model with these further options. Gives the URL of the server."""
    with running(binary, *options) as (url, _):
        yield url
