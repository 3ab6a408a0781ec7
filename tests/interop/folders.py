"""Checkpoint folders written name by name from numpy, without transformers."""

import json
import struct

import numpy as np
from safetensors.numpy import save_file

GPT2_CONFIG = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 13,
    "n_positions": 11,
    "n_embd": 6,
    "n_layer": 2,
    "n_head": 3,
    "n_inner": 10,
    "layer_norm_epsilon": 2e-4,
}
BERT_CONFIG = {
    "model_type": "bert",
    "architectures": ["BertForPreTraining"],
    "vocab_size": 13,
    "max_position_embeddings": 11,
    "hidden_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 10,
}
LLAMA_CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 13,
    "hidden_size": 6,
    "intermediate_size": 10,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "rms_norm_eps": 1e-5,
}
DISTILBERT_CONFIG = {
    "model_type": "distilbert",
    "architectures": ["DistilBertForSequenceClassification"],
    "vocab_size": 13,
    "max_position_embeddings": 11,
    "dim": 6,
    "n_layers": 2,
    "n_heads": 3,
    "hidden_dim": 10,
    "id2label": {"0": "bad", "1": "good", "2": "so"},
}
T5_CONFIG = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "vocab_size": 13,
    "d_model": 6,
    "d_kv": 2,
    "d_ff": 10,
    "num_layers": 2,
    "num_heads": 3,
    "relative_attention_num_buckets": 8,
}


def write_folder(folder, config, tensors):
    """A folder of one file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def drawn(shapes, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def _both(name, outputs, *inputs):
    """Shapes of a Linear's (or, of no inputs, a norm's) two tensors."""
    return {f"{name}.weight": (outputs, *inputs), f"{name}.bias": (outputs,)}


def gpt2_tensors(config=GPT2_CONFIG, prefix="transformer.", **options):
    """All of a GPT-2's tensors; Conv1D is [inputs, outputs]."""
    width, hidden = config["n_embd"], config["n_inner"]
    shapes = {"wte.weight": (config["vocab_size"], width), "wpe.weight": (config["n_positions"], width)}
    for layer in range(config["n_layer"]):
        name = f"h.{layer}."
        shapes |= _both(f"{name}ln_1", width) | _both(f"{name}ln_2", width)
        for part, inputs, outputs in (
            ("attn.c_attn", width, 3 * width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", width, hidden),
            ("mlp.c_proj", hidden, width),
        ):
            shapes |= {f"{name}{part}.weight": (inputs, outputs), f"{name}{part}.bias": (outputs,)}
    shapes |= _both("ln_f", width)
    return drawn({prefix + name: shape for name, shape in shapes.items()}, **options)


def bert_tensors(config=BERT_CONFIG, **options):
    """All of a BertForPreTraining's tensors; Linear is [outputs, inputs]."""
    width, hidden = config["hidden_size"], config["intermediate_size"]
    shapes = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], width),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], width),
        "embeddings.token_type_embeddings.weight": (2, width),
        **_both("embeddings.LayerNorm", width),
        **_both("pooler.dense", width, width),
    }
    for layer in range(config["num_hidden_layers"]):
        name = f"encoder.layer.{layer}."
        for part in ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"):
            shapes |= _both(name + part, width, width)
        shapes |= _both(f"{name}attention.output.LayerNorm", width) | _both(f"{name}output.LayerNorm", width)
        shapes |= _both(f"{name}intermediate.dense", hidden, width) | _both(f"{name}output.dense", width, hidden)
    shapes = {f"bert.{name}": shape for name, shape in shapes.items()} | {
        "cls.predictions.bias": (config["vocab_size"],),
        **_both("cls.predictions.transform.dense", width, width),
        **_both("cls.predictions.transform.LayerNorm", width),
        **_both("cls.seq_relationship", 2, width),
    }
    return drawn(shapes, **options)


def llama_tensors(config=LLAMA_CONFIG, **options):
    """All of an untied Llama's tensors."""
    width, hidden = config["hidden_size"], config["intermediate_size"]
    head = width // config["num_attention_heads"]
    shapes = {
        "model.embed_tokens.weight": (config["vocab_size"], width),
        "lm_head.weight": (config["vocab_size"], width),
        "model.norm.weight": (width,),
    }
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        shapes |= {
            f"{name}input_layernorm.weight": (width,),
            f"{name}post_attention_layernorm.weight": (width,),
            f"{name}self_attn.q_proj.weight": (width, width),
            f"{name}self_attn.k_proj.weight": (head, width),
            f"{name}self_attn.v_proj.weight": (head, width),
            f"{name}self_attn.o_proj.weight": (width, width),
            f"{name}mlp.gate_proj.weight": (hidden, width),
            f"{name}mlp.up_proj.weight": (hidden, width),
            f"{name}mlp.down_proj.weight": (width, hidden),
        }
    return drawn(shapes, **options)


def distilbert_tensors(config=DISTILBERT_CONFIG, num_labels=3, **options):
    """All of a DistilBertForSequenceClassification's tensors."""
    width, hidden = config["dim"], config["hidden_dim"]
    shapes = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], width),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], width),
        **_both("embeddings.LayerNorm", width),
    }
    for layer in range(config["n_layers"]):
        name = f"transformer.layer.{layer}."
        for part in ("q_lin", "k_lin", "v_lin", "out_lin"):
            shapes |= _both(f"{name}attention.{part}", width, width)
        shapes |= _both(f"{name}sa_layer_norm", width) | _both(f"{name}output_layer_norm", width)
        shapes |= _both(f"{name}ffn.lin1", hidden, width) | _both(f"{name}ffn.lin2", width, hidden)
    shapes = {f"distilbert.{name}": shape for name, shape in shapes.items()}
    shapes |= _both("pre_classifier", width, width) | _both("classifier", num_labels, width)
    return drawn(shapes, **options)


def t5_tensors(config=T5_CONFIG, **options):
    """All of a T5's of the first kind, whose head is its embeddings."""
    width, hidden = config["d_model"], config["d_ff"]
    inner = config["d_kv"] * config["num_heads"]
    shapes = {"shared.weight": (config["vocab_size"], width)}
    for side, attentions in (("encoder", ("SelfAttention",)), ("decoder", ("SelfAttention", "EncDecAttention"))):
        for layer in range(config["num_layers"]):
            name = f"{side}.block.{layer}.layer."
            for number, attention in enumerate(attentions):
                shapes |= {f"{name}{number}.{attention}.{part}.weight": (inner, width) for part in "qkv"}
                shapes[f"{name}{number}.{attention}.o.weight"] = (width, inner)
            last = f"{name}{len(attentions)}"
            shapes[f"{last}.DenseReluDense.wi.weight"] = (hidden, width)
            shapes[f"{last}.DenseReluDense.wo.weight"] = (width, hidden)
            shapes |= {f"{name}{number}.layer_norm.weight": (width,) for number in range(len(attentions) + 1)}
        bias = (config["relative_attention_num_buckets"], config["num_heads"])
        shapes[f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] = bias
        shapes[f"{side}.final_layer_norm.weight"] = (width,)
    return drawn(shapes, **options)


def sentencepiece_file(file, pieces):
    """A unigram model of SentencePiece as T5 has it: padding 0, end 1, unknown 2, then pieces, the likelier first."""
    marks = (("<pad>", 3), ("</s>", 3), ("<unk>", 2))
    entries = [(piece, 0.0, kind) for piece, kind in marks]
    entries += [(piece, -1.0 - number / len(pieces), 1) for number, piece in enumerate(pieces)]
    content = b""
    for piece, score, kind in entries:
        text = piece.encode()
        message = bytes([10, len(text)]) + text + b"\x15" + struct.pack("<f", score) + bytes([24, kind])
        content += bytes([10, len(message)]) + message
    # The trainer's settings: unknown 2, no beginning (-1), end 1, padding 0.
    settings = b"\xc0\x02\x02" + b"\xc8\x02" + b"\xff" * 9 + b"\x01" + b"\xd0\x02\x01" + b"\xd8\x02\x00"
    file.write_bytes(content + bytes([18, len(settings)]) + settings)
