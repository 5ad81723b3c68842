"""The layouts by name: those of libraries and language models, and with those of `vision` the whole list."""

from multihead.weights.arrange import Columns, Dealt, Groups
from multihead.weights.layout import (
    BUFFERS,
    GROUPED,
    KERNELS,
    LLAMA,
    NORMS,
    NORMS_LESS_ONE,
    OUT,
    QKV,
    QKV_BIAS,
    Entry,
    Layout,
    below,
    fused,
    kernels,
    linear,
    per_head,
    separate,
)  # fmt: skip
from multihead.weights.vision import VISION

llama = linear("q_proj", "k_proj", "v_proj", "o_proj")

REGISTERED = (
    Layout(
        "torch",
        "torch.nn.MultiheadAttention, packed",
        below("in_proj_weight", "out_proj.weight"),
        (
            Entry("in_proj_weight", QKV),
            Entry("in_proj_bias", QKV_BIAS),
            Entry("out_proj.weight", ("o",)),
            Entry("out_proj.bias", ("o_bias",)),
        ),
        either=True,
    ),
    Layout(
        "torch-split",
        "torch.nn.MultiheadAttention with kdim = vdim = C",
        separate("q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight", k_shape="(E,C)")
        + "\n  in_proj_bias           (3E,): q, then k, then v",
        (
            *(Entry(f"{part}_proj_weight", (part,)) for part in QKV),
            Entry("in_proj_bias", QKV_BIAS),
            Entry("out_proj.weight", ("o",)),
            Entry("out_proj.bias", ("o_bias",)),
        ),
        either=True,
        allows="C≠E",
    ),
    Layout(
        "gpt2",
        "GPT-2's Conv1D, which computes x·W",
        """
  c_attn.weight          ┌────┬────┬───┬────┬────┬───┬────┬────┬───┐
  (E,3E)                 │ q0 │ q1 │ … │ k0 │ k1 │ … │ v0 │ v1 │ … │  a head is D columns
                         └────┴────┴───┴────┴────┴───┴────┴────┴───┘
  c_proj.weight          (E,E), transposed as well""",
        fused("c_attn", "c_proj", Columns(), Columns()),
        ignores=BUFFERS,
    ),
    Layout(
        "nanogpt",
        "GPT-2's names with nn.Linear (nanoGPT, minGPT)",
        below("c_attn.weight", "c_proj.weight"),
        fused("c_attn", "c_proj"),
        either=True,
        ignores=BUFFERS,
    ),
    Layout(
        "gpt-bigcode",
        "nanoGPT's names packed by key/value head: GPTBigCode (StarCoder: G=1)",
        per_head("c_attn.weight", "c_proj.weight", "((H+2G)·D,E)"),
        fused("c_attn", "c_proj", Groups()),
        also=("nanogpt-per-head",),
        either=True,
        allows="G<H",
        ignores=BUFFERS,
    ),
    Layout(
        "gpt-neox",
        "GPT-NeoX, Pythia, BLOOM: interleaved by head",
        per_head("query_key_value.weight", "dense.weight"),
        fused("query_key_value", "dense", Groups()),
        also=("bloom",),
        either=True,
        pairing="halves",
        ignores=BUFFERS,
    ),
    Layout(
        "falcon",
        "Falcon: interleaved by key/value head (G=1: multi-query)",
        """
  query_key_value.weight ┌────┐
  ((H+2G)·D,E)           │ q0 │  key/value head 0: the H/G query heads
                         │ q1 │  that read it,
                         │ k0 │  its key,
                         │ v0 │  its value
                         ├────┤
                         │ q2 │  key/value head 1
                         │ q3 │
                         │ k1 │
                         │ v1 │
                         │ …  │
                         └────┘
  dense.weight           (E,E)""",
        fused("query_key_value", "dense", Groups()),
        either=True,
        pairing="halves",
        allows="G<H",
        ignores=BUFFERS,
    ),
    Layout(
        "chatglm",
        "ChatGLM 2 and 3: the names of Falcon, packed per matrix; biases for q, k and v",
        below("query_key_value.weight", "dense.weight", "((H+2G)·D,E)", "(E,H·D)"),
        fused("query_key_value", "dense", bias="qkv"),
        pairing="interleaved",
        allows="G<H H·D≠E",
        ignores=BUFFERS,
    ),
    Layout(
        "ling",
        "Ling: the names of Falcon, packed per matrix, without biases",
        below("query_key_value.weight", "dense.weight", "((H+2G)·D,E)", "(E,H·D)"),
        fused("query_key_value", "dense", bias=""),
        pairing="halves",
        allows="G<H H·D≠E",
    ),
    Layout(
        "modernbert",
        "ModernBERT",
        below("Wqkv.weight", "Wo.weight"),
        fused("Wqkv", "Wo"),
        either=True,
        pairing="halves",
    ),
    Layout(
        "bert",
        "BERT, RoBERTa, ELECTRA; the prefix ends in attention.",
        separate("self.query.weight", "self.key.weight", "self.value.weight", "output.dense.weight"),
        linear("self.query", "self.key", "self.value", "output.dense"),
        also=("roberta", "electra"),
        ignores=("output.LayerNorm.*",),
    ),
    Layout(
        "gpt-j",
        "GPT-J",
        OUT,
        linear("q_proj", "k_proj", "v_proj", "out_proj", bias=""),
        also=("gptj",),
        pairing="interleaved",
        ignores=(*BUFFERS, "embed_positions"),
    ),
    Layout(
        "t5",
        "T5; scores are not scaled: make the layer with scale=1.0",
        separate("q.weight", "k.weight", "v.weight", "o.weight", q_shape="(H·D,E)", k_shape="(H·D,E)"),
        linear("q", "k", "v", "o", bias=""),
        allows="H·D≠E",
        ignores=("relative_attention_bias.weight",),
    ),
    Layout(
        "llama",
        "Llama (Hugging Face), Mistral, Gemma, and ViT in transformers 5",
        LLAMA,
        llama,
        also=("mistral", "gemma"),
        either=True,
        pairing="halves",
        allows="G<H H·D≠E",
        ignores=("rotary_emb.inv_freq",),
    ),
    Layout(
        "qwen2",
        "Qwen2: biases for q, k and v",
        LLAMA,
        linear("q_proj", "k_proj", "v_proj", "o_proj", bias="qkv"),
        pairing="halves",
        allows="G<H H·D≠E",
    ),
    Layout(
        "qwen3",
        "Qwen3: llama with QK-norm",
        LLAMA + "\n  q_norm.weight (D,)     k_norm.weight (D,)",
        llama + NORMS,
        either=True,
        pairing="halves",
        allows="G<H H·D≠E",
    ),
    Layout(
        "gemma3",
        "Gemma 3: llama with QK-norm, stored less 1",
        LLAMA + "\n  q_norm.weight (D,)     k_norm.weight (D,): what is added to 1",
        llama + NORMS_LESS_ONE,
        either=True,
        pairing="halves",
        allows="G<H H·D≠E",
    ),
    Layout(
        "gpt-oss",
        "gpt-oss: llama with biases and sinks",
        LLAMA + "\n  sinks (H,)",
        (*llama, Entry("sinks", ("sinks",))),
        pairing="halves",
        allows="G<H H·D≠E",
    ),
    Layout(
        "meta-llama",
        "Llama as Meta publishes it",
        separate("wq.weight", "wk.weight", "wv.weight", "wo.weight", **GROUPED),
        linear("wq", "wk", "wv", "wo", bias=""),
        pairing="interleaved",
        allows="G<H H·D≠E",
    ),
    Layout(
        "phi3",
        "Phi-3",
        below("qkv_proj.weight", "o_proj.weight", "((H+2G)·D,E)", "(E,H·D)"),
        fused("qkv_proj", "o_proj", bias=""),
        pairing="halves",
        allows="G<H H·D≠E",
    ),
    Layout(
        "x-transformers",
        "x-transformers; its query head h reads key/value head h % G, ours h // (H/G): q and o are reordered",
        """
  to_q.weight            ┌────┐  to_k.weight            ┌────┐  to_v.weight            ┌────┐
  (H·D,E)                │ q0 │  (G·D,C)                │ k0 │  (G·V,C)                │ v0 │
                         │ q2 │                         │ k1 │                         │ v1 │
                         │ q1 │  H=4, G=2               └────┘                         └────┘
                         │ q3 │
                         └────┘
  to_out.weight          (E,H·V), its heads in the order of q""",
        (
            Entry("to_q.weight", ("q",), Dealt()),
            Entry("to_k.weight", ("k",)),
            Entry("to_v.weight", ("v",)),
            Entry("to_out.weight", ("o",), Dealt()),
        ),
        pairing="interleaved",
        allows="G<H H·D≠E V≠D C≠E",
    ),
    Layout(
        "keras",
        "keras.layers.MultiHeadAttention and GroupQueryAttention",
        KERNELS.format(k="(C,G,D)", v="(C,G,V)", o="attention_output", o_shape="(H,V,E)"),
        kernels("attention_output"),
        either=True,
        allows="G<H H·D≠E V≠D C≠E",
    ),
    Layout(
        "flax",
        "flax.linen.MultiHeadDotProductAttention, flax.nnx.MultiHeadAttention",
        KERNELS.format(k="(C,H,D)", v="(C,H,D)", o="out", o_shape="(H,D,E)"),
        kernels("out"),
        either=True,
        allows="H·D≠E C≠E",
    ),
    *VISION,
)

LAYOUTS = {name: layout for layout in REGISTERED for name in (layout.name, *layout.also)}
