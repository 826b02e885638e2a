"""The models: small, with example inputs, and the classes of their repeated blocks. No third-party source is edited.

The residual network and one U-Net belong to this suite, in the style of Flax's examples. The Hugging Face models are
from the last releases of ``transformers`` and ``diffusers`` with Flax models.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from tests.support import AXES
from xlstm_jax.distributed import nnx_model

BATCH, LENGTH, WIDTH, VOCAB = 8, 8, 32, 64


@dataclass(frozen=True)
class Case:
    """A model, ``where`` to shard the model, and inputs with leading dim ``BATCH``.

    ``on_mesh`` replaces the model if devices share a batch: with the axes of its statistics. ``exact_gelu``: the model
    computes exact GELU, or another function with ``erf``.
    """

    model: Any
    where: Any
    inputs: tuple[Any, ...]
    on_mesh: Any = None
    exact_gelu: bool = False

    def output(self, result: Any) -> jax.Array:
        """Returns the array in the model's result: logits, a sample."""
        if isinstance(result, Mapping):
            return result["logits"] if "logits" in result else next(iter(result.values()))
        return result if isinstance(result, jax.Array) else result[0]


def tokens(seed: int = 1, length: int = LENGTH) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), (BATCH, length), 3, VOCAB)


def ones() -> jax.Array:
    return jnp.ones((BATCH, LENGTH), jnp.int32)


def positions() -> jax.Array:
    return jnp.tile(jnp.arange(LENGTH), (BATCH, 1))


def images(channels_last: bool = True, size: int = 16, channels: int = 3) -> jax.Array:
    shape = (BATCH, size, size, channels) if channels_last else (BATCH, channels, size, size)
    return jax.random.normal(jax.random.key(2), shape)


def gpt2(**sizes: Any) -> Case:
    from transformers.models.gpt2 import modeling_flax_gpt2 as gpt2

    config = gpt2.GPT2Config(vocab_size=VOCAB, n_positions=LENGTH, n_embd=WIDTH, n_layer=2, n_head=4, **sizes)
    model = gpt2.FlaxGPT2LMHeadModule(config)
    return Case(model, (gpt2.FlaxGPT2Block, nn.Embed), (tokens(), ones(), positions()))


class ScannedGPT2(nn.Module):
    """A user's model around a third-party block: an embedding, a scan over layers, with or without remat."""

    config: Any
    block: Any
    remat: bool = False

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        def layer(block: nn.Module, x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return block(x)[0], None

        layer = nn.remat(layer, prevent_cse=False) if self.remat else layer
        layers = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True}, length=3)
        embed = nn.Embed(VOCAB, WIDTH, name="embed")
        return embed.attend(layers(self.block(self.config, name="blocks"), embed(ids), None)[0])


def gpt2_scanned(remat: bool = False) -> Case:
    from transformers.models.gpt2 import modeling_flax_gpt2 as gpt2

    config = gpt2.GPT2Config(n_positions=LENGTH, n_embd=WIDTH, n_head=4)
    return Case(ScannedGPT2(config, gpt2.FlaxGPT2Block, remat), (gpt2.FlaxGPT2Block, nn.Embed), (tokens(),))


def bert(remat: bool = False) -> Case:
    from transformers.models.bert import modeling_flax_bert as bert

    config = bert.BertConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=2 * WIDTH,
        max_position_embeddings=LENGTH,
    )
    model = bert.FlaxBertForMaskedLMModule(config, gradient_checkpointing=remat)
    inputs = (tokens(), ones(), jnp.zeros_like(ones()), positions(), None)
    return Case(model, (bert.FlaxBertLayer, nn.Embed), inputs, exact_gelu=True)


def t5(remat: bool = False) -> Case:
    from transformers.models.t5 import modeling_flax_t5 as t5

    # JAX has dropped the keyword a_max of clip that this file uses: substitute a jnp with the keyword.
    t5.jnp = SimpleNamespace(**vars(jnp) | {"clip": lambda x, a_max: jnp.clip(x, max=a_max)})
    config = t5.T5Config(
        vocab_size=VOCAB, d_model=WIDTH, d_kv=8, d_ff=2 * WIDTH, num_layers=2, num_heads=4, use_cache=False
    )
    model = t5.FlaxT5ForConditionalGenerationModule(config, gradient_checkpointing=remat)
    return Case(model, (t5.FlaxT5Block, nn.Embed), (tokens(), ones(), tokens(2), ones()))


def llama() -> Case:
    from transformers.models.llama import modeling_flax_llama as llama

    config = llama.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,  # length of the table of angles
    )
    model = llama.FlaxLlamaForCausalLMModule(config)
    return Case(model, (llama.FlaxLlamaDecoderLayer, nn.Embed), (tokens(), ones(), positions()))


def whisper(remat: bool = False) -> Case:
    from transformers.models.whisper import modeling_flax_whisper as whisper

    config = whisper.WhisperConfig(
        vocab_size=VOCAB,
        num_mel_bins=8,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=2 * WIDTH,
        decoder_ffn_dim=2 * WIDTH,
        d_model=WIDTH,
        max_source_positions=LENGTH,
        max_target_positions=LENGTH,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    model = whisper.FlaxWhisperForConditionalGenerationModule(config, gradient_checkpointing=remat)
    sound = jax.random.normal(jax.random.key(3), (BATCH, 8, 2 * LENGTH))
    where = (whisper.FlaxWhisperEncoderLayer, whisper.FlaxWhisperDecoderLayer, nn.Embed)
    return Case(model, where, (sound, tokens(), ones(), positions()), exact_gelu=True)


def vit() -> Case:
    from transformers.models.vit import modeling_flax_vit as vit

    config = vit.ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=2 * WIDTH,
        image_size=16,
        patch_size=8,
        num_labels=8,
    )
    return Case(vit.FlaxViTForImageClassificationModule(config), vit.FlaxViTLayer, (images(),), exact_gelu=True)


def bart() -> Case:
    from transformers.models.bart import modeling_flax_bart as bart

    config = bart.BartConfig(
        vocab_size=VOCAB,
        d_model=WIDTH,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=2 * WIDTH,
        decoder_ffn_dim=2 * WIDTH,
        max_position_embeddings=LENGTH,
    )
    where = (bart.FlaxBartEncoderLayer, bart.FlaxBartDecoderLayer, nn.Embed)
    inputs = (tokens(), ones(), tokens(2), ones(), positions(), positions())
    return Case(bart.FlaxBartForConditionalGenerationModule(config), where, inputs, exact_gelu=True)


def unet() -> Case:
    from diffusers.models.unets import unet_2d_condition_flax as unet

    model = unet.FlaxUNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        block_out_channels=(32, 32),
        layers_per_block=1,
        attention_head_dim=4,
        cross_attention_dim=WIDTH,
    )
    text = jax.random.normal(jax.random.key(4), (BATCH, LENGTH, WIDTH))
    where = (unet.FlaxCrossAttnDownBlock2D, unet.FlaxCrossAttnUpBlock2D, unet.FlaxUNetMidBlock2DCrossAttn)
    return Case(model, where, (images(channels_last=False, size=8, channels=4), jnp.arange(BATCH), text))


def resnet(remat: bool = False) -> Case:
    from tests.vision_models import ResNet, ResNetBlock

    where = (ResNetBlock, nn.Conv, nn.Dense)
    return Case(ResNet(remat=remat), where, (images(),), ResNet(axis_name=AXES, remat=remat))


def own_unet() -> Case:
    from tests.vision_models import UNet, UNetBlock

    return Case(UNet(), (UNetBlock, nn.Conv), (images(), jnp.arange(BATCH) / BATCH))


def mamba() -> Case:
    from flax import nnx
    from mamba2_jax.modeling import Mamba2Block, Mamba2Config, Mamba2ForCausalLM

    config = Mamba2Config(
        vocab_size=VOCAB, hidden_size=WIDTH, state_size=16, head_dim=8, chunk_size=8, num_hidden_layers=2
    )
    model = nnx_model(lambda rngs: Mamba2ForCausalLM(config, rngs=rngs))
    return Case(model, (Mamba2Block, nnx.Embed), (tokens(),))


CASES: dict[str, Callable[[], Case]] = {
    "GPT-2": gpt2,
    "GPT-2's block, scan": gpt2_scanned,
    "GPT-2's block, scan and remat": partial(gpt2_scanned, remat=True),
    "BERT": bert,
    "BERT, remat": partial(bert, remat=True),
    "T5": t5,
    "T5, remat": partial(t5, remat=True),
    "Llama": llama,
    "Whisper": whisper,
    "Whisper, remat": partial(whisper, remat=True),
    "ViT": vit,
    "BART": bart,
    "U-Net of diffusers": unet,
    "ResNet": resnet,
    "ResNet, remat": partial(resnet, remat=True),
    "U-Net": own_unet,
    "Mamba-2 (NNX)": mamba,
}
