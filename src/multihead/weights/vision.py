"""The layouts of models that see or hear: vision transformers, Swin, BEiT, SAM, CLIP, Whisper."""

from multihead.weights.arrange import Groups
from multihead.weights.layout import OUT, QKV, Entry, Layout, below, fused, linear, per_head, separate

TABLE = "\n  relative_position_bias_table: beside"
TABLES = ("relative_position_bias_table", "relative_position_index")
vit = ("attention.query", "attention.key", "attention.value", "output.dense")

VISION = (
    Layout(
        "vit",
        "ViT files of Hugging Face; the prefix ends in the first attention.",
        separate(*(f"{name}.weight" for name in vit)),
        linear(*vit),
        also=("deit", "dinov2"),
    ),
    Layout(
        "vit-no-qkv-bias",
        "the same with qkv_bias=False",
        separate(*(f"{name}.weight" for name in vit)),
        linear(*vit, bias="o"),
    ),
    Layout(
        "timm",
        "timm's vision transformers",
        below("qkv.weight", "proj.weight"),
        fused("qkv", "proj"),
    ),
    Layout(
        "timm-no-qkv-bias",
        "the same with qkv_bias=False",
        below("qkv.weight", "proj.weight"),
        fused("qkv", "proj", bias="o"),
    ),
    Layout(
        "clip",
        "CLIP, SigLIP, BART; SAM's mask decoder, whose heads are narrower than the model",
        separate(
            "q_proj.weight", "k_proj.weight", "v_proj.weight", "out_proj.weight", q_shape="(H·D,E)", k_shape="(H·D,C)"
        ),
        linear("q_proj", "k_proj", "v_proj", "out_proj"),
        also=("siglip", "bart", "sam"),
        allows="H·D≠E C≠E",
    ),
    Layout(
        "timm-per-head",
        "timm's names packed per head; x goes through `norm` first",
        per_head("qkv.weight", "proj.weight", "(H·(2D+V),E)", "(E,H·V)"),
        fused("qkv", "proj", Groups()),
        also=("tiny-vit", "mobile-sam"),
        allows="H·D≠E V≠D",
        ignores=("norm.*", "attention_biases", "attention_bias_idxs"),
    ),
    Layout(
        "timm-per-head-no-qkv-bias",
        "the same without a bias for q, k and v",
        per_head("qkv.weight", "proj.weight", "(H·(2D+V),E)", "(E,H·V)"),
        fused("qkv", "proj", Groups(), bias="o"),
        allows="H·D≠E V≠D",
    ),
    Layout(
        "sam-vit",
        "SAM's image encoder; rel_pos_h and rel_pos_w stand beside",
        below("qkv.weight", "proj.weight"),
        fused("qkv", "proj"),
        ignores=("rel_pos_h", "rel_pos_w"),
    ),
    Layout(
        "swin",
        "Swin; the table goes into mh.positions.SwinBias",
        below("qkv.weight", "proj.weight", "(3·H·D,E)", "(E,H·D)") + TABLE,
        fused("qkv", "proj"),
        allows="H·D≠E",
        ignores=TABLES,
    ),
    Layout(
        "swin-hf",
        "Swin in files of Hugging Face; the prefix ends in attention.",
        separate("self.query.weight", "self.key.weight", "self.value.weight", "output.dense.weight")
        + TABLE.replace("relative", "self.relative"),
        linear("self.query", "self.key", "self.value", "output.dense"),
        ignores=tuple(f"self.{name}" for name in TABLES),
    ),
    Layout(
        "beit",
        "BEiT, EVA: biases for q and v apart; the table goes into SwinBias(class_token=True)",
        below("qkv.weight", "proj.weight", "(3·H·D,E)", "(E,H·D)") + "\n  q_bias (H·D,)          v_bias (H·D,)" + TABLE,
        (
            Entry("qkv.weight", QKV),
            Entry("proj.weight", ("o",)),
            *(Entry(name, (name,)) for name in ("q_bias", "v_bias")),
            Entry("proj.bias", ("o_bias",)),
        ),
        allows="H·D≠E",
        ignores=(*TABLES, "k_bias"),
    ),
    Layout(
        "beit-hf",
        "BEiT in files of Hugging Face; the prefix ends in the first attention.",
        separate(*(f"{name}.weight" for name in vit))
        + TABLE.replace("relative", "attention.relative_position_bias.relative"),
        linear(*vit, bias="qvo"),
        ignores=tuple(f"attention.relative_position_bias.{name}" for name in TABLES),
    ),
    Layout(
        "whisper",
        "Whisper: k has no bias",
        OUT,
        linear("q_proj", "k_proj", "v_proj", "out_proj", bias="qvo"),
    ),
    Layout(
        "openai-whisper",
        "Whisper as OpenAI publishes it: k has no bias",
        separate("query.weight", "key.weight", "value.weight", "out.weight"),
        linear("query", "key", "value", "out", bias="qvo"),
    ),
)
