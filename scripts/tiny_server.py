"""A server of a tiny model with random weights, for scripts that test `ottava serve`."""

import contextlib
import json
import random
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

root = Path(__file__).resolve().parent.parent
KEY, MODEL = "secret", "model"
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}{{ m.role }}: {% if m.reasoning_content %}<think>"
    "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %} "
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% if enable_thinking %}<think>"
    "{% endif %}{% endif %}"
)


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
    numbers, header, data = random.Random(1), {}, bytearray()
    for name, shape in shapes.items():
        count = shape[0] * (shape[1] if len(shape) == 2 else 1)
        values = [1.0 if len(shape) == 1 else numbers.gauss(0, 0.2) for _ in range(count)]
        begin = len(data)
        data += b"".join(struct.pack("<f", value)[2:] for value in values)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


@contextlib.contextmanager
def serving(binary, *options):
    """Serves the model with these further options. Gives the URL of the server."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        command = [binary, "serve", folder, "--port", "0", "--device", "cpu", "--api-key", KEY, "--served-model-name", MODEL, *options]
        server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            lines = (line for line in server.stderr if " at http://" in line)
            yield "http://" + next(lines).strip().split("http://")[1]
        finally:
            server.terminate()
            server.wait()
