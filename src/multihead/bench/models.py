"""Hugging Face models with random weights: the same model on our attention and on one of transformers' own.

A contender is a forward pass of the whole model, as its users call it.
"""

import copy

import torch

from multihead.bench.cases import HF_EAGER, HF_SDPA
from multihead.bench.measure import Local

OURS = "multihead"
ATTENTIONS = {HF_SDPA: "sdpa", HF_EAGER: "eager"}
VOCABULARY = 1000  # its embedding is a lookup, and no head is asked for


def build(case, seed=0):
    """The model of a case, and its inputs."""
    import transformers

    import multihead.hf  # noqa: F401  registers our attention

    torch.manual_seed(seed)
    sizes = {
        "hidden_size": case.E,
        "num_hidden_layers": case.layers,
        "num_attention_heads": case.H,
        "intermediate_size": case.F,
    }
    if case.kind == "ViT":
        model = transformers.ViTModel(transformers.ViTConfig(**sizes))
        return model.eval().to(case.type), {"pixel_values": torch.randn(case.B, 3, 224, 224).to(case.type)}
    sizes |= {"vocab_size": VOCABULARY, "max_position_embeddings": case.N + case.cached}
    if case.kind == "BERT":
        model = transformers.BertModel(transformers.BertConfig(**sizes))
    else:
        model = transformers.LlamaModel(transformers.LlamaConfig(**sizes, num_key_value_heads=case.G))
    inputs = {"input_ids": torch.randint(VOCABULARY, (case.B, case.N))}
    if case.cached:
        shape = (2, case.layers, case.B, case.G, case.cached, case.E // case.H)
        inputs["past"] = torch.randn(shape).to(case.type)  # keys and values of each layer
    return model.eval().to(case.type), inputs


def contender(case, model, inputs, attention, name):
    """A copy of the model on the attention that transformers knows by that name."""
    model = copy.deepcopy(model)
    model.set_attn_implementation(attention)
    if not case.cached:
        return Local(name, lambda: model(**inputs, output_attentions=case.attentions), unpack=flat)
    cache = cache_of(inputs["past"])

    def step():
        output = model(input_ids=inputs["input_ids"], past_key_values=cache, use_cache=True)
        cache.crop(-case.N)  # a view: the next call finds what this one found
        return output

    return Local(name, step, unpack=flat)


def cache_of(past):
    """The cache that transformers makes by itself, filled."""
    import transformers

    cache = transformers.DynamicCache()
    for layer, (keys, values) in enumerate(zip(*past)):
        cache.update(keys.clone(), values.clone(), layer)
    return cache


def flat(output):
    """The last layer's state, and where they were asked for the attentions of the last layer."""
    found = [output.last_hidden_state] + ([output.attentions[-1]] if output.attentions else [])
    return torch.cat([t.flatten() for t in found])


def answer(case, model, inputs, dtype):
    """What the model gives in `dtype` on transformers' own attention: `eager` where weights are asked for."""
    inputs = {name: t.to(dtype) if t.dtype.is_floating_point else t for name, t in inputs.items()}
    attention = "eager" if case.attentions else "sdpa"
    return contender(case, copy.deepcopy(model).to(dtype), inputs, attention, attention).result()
