"""Steps of making inputs that need code: placeholders that are counted, words that move, labels of some heads."""

from collections.abc import Callable, Sequence

import torch

from tests.zoo.form import Batch, Scene

_SPECIAL = 8  # so many of the last ids mean images and such


def ragged(length: int) -> torch.Tensor:
    """The mask of two sequences, the second shorter."""
    return (torch.arange(length) < torch.tensor([[length], [length * 2 // 3]])).long()


def merged_images(batch: Batch, scene: Scene) -> Batch:
    """An image of four patches and one of eight; a merged patch, which one word stands for, is four."""
    vision = getattr(scene.config, "vision_config", scene.config)
    grids = torch.tensor([[1, 2, 2], [1, 2, 4]])
    volume = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = scene.draw.normal(int(grids.prod(-1).sum()), volume)
    ids, image = batch["input_ids"], scene.config.image_token_id
    special = (ids >= image) & (ids <= scene.config.vision_end_token_id)
    ids = torch.where(special, ids + 10, ids)
    ids[0, 2:3], ids[1, 1:3] = image, image
    more = {"pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": (ids == image).int()}
    if "labels" in batch and batch["labels"].shape == ids.shape:
        more["labels"] = batch["labels"].masked_fill(ids == image, -100)
    return {**batch, "input_ids": ids, **more}


def stand_in(batch: Batch, scene: Scene, word: int, count: int, start: int = 0) -> Batch:
    """``count`` words of each text stand for the parts of something else."""
    ids = torch.where(batch["input_ids"] == word, word + 10, batch["input_ids"])
    ids[:, start : start + count] = word
    return {**batch, "input_ids": ids}


def put(batch: Batch, scene: Scene, word: int, start: int, count: int = 1) -> Batch:
    """One word in the place of ``count`` others of each text."""
    ids = batch["input_ids"].clone()
    ids[:, start : start + count] = word
    return {**batch, "input_ids": ids}


def insert(batch: Batch, scene: Scene, word: int, count: int) -> Batch:
    """One word ``count`` times after the first word of each text, without labels."""
    rows = (len(batch["input_ids"]), count)

    def grown(name: str, value: int) -> torch.Tensor:
        return torch.cat([batch[name][:, :1], torch.full(rows, value), batch[name][:, 1:]], 1)

    batch = {**batch, "input_ids": grown("input_ids", word)}
    batch["attention_mask"] = torch.cat([torch.ones(rows, dtype=torch.long), batch["attention_mask"]], 1)
    if "labels" in batch and batch["labels"].ndim > 1:
        batch["labels"] = grown("labels", -100)
    return batch


def longer(batch: Batch, scene: Scene) -> Batch:
    """One more token."""
    names = [name for name in ("input_ids", "attention_mask") if name in batch]
    if "labels" in batch and batch["labels"].ndim > 1:
        names.append("labels")
    return {**batch, **{name: torch.cat([batch[name], batch[name][..., -1:]], -1) for name in names}}


def global_words(batch: Batch, scene: Scene) -> Batch:
    """Words that see all others: the first of each text, and one more of the first text."""
    chosen = torch.zeros_like(batch["input_ids"])
    chosen[..., 0] = 1
    chosen[0, ..., 4] = 1
    return {**batch, "global_attention_mask": chosen}


def boxes(batch: Batch, scene: Scene) -> Batch:
    """Where each word stands on a page."""
    corners = scene.draw(0, scene.config.max_2d_position_embeddings // 2, *batch["input_ids"].shape, 4)
    return {**batch, "bbox": torch.cat([corners[..., :2], corners[..., :2] + corners[..., 2:]], -1)}


def relations(batch: Batch, scene: Scene) -> Batch:
    """BROS: boxes, which words begin an entity, and which word comes next or belongs to which."""
    head, shape = scene.head, batch["input_ids"].shape
    batch["bbox"] = scene.draw(0, 100, *shape, 4) / 100
    if "Spade" in head:
        first = scene.draw(0, 2, *shape).bool() & batch["attention_mask"].bool()
        first[:, 0] = True
        batch["bbox_first_token_mask"] = first
    if "SpadeEE" in head:
        batch["initial_token_labels"] = batch.pop("labels").clamp(min=0)
        batch["subsequent_token_labels"] = torch.full(shape, shape[1])  # the end of the entity
        batch["subsequent_token_labels"][:, :3] = torch.tensor([1, 2, 3])
    elif "SpadeEL" in head:
        batch["labels"] = torch.zeros(shape, dtype=torch.long)
        batch["labels"][:, 0] = shape[1]
    return batch


def table(batch: Batch, scene: Scene) -> Batch:
    """TAPAS: a question, then a table, by segment, column and row; further words are of the last cell."""
    shape = batch["input_ids"].shape
    kinds = torch.stack([scene.draw(0, size, *shape) for size in scene.config.type_vocab_sizes], -1)
    for place, first in enumerate(([0, 0, 1, 1, 1, 1, 1], [0, 0, 1, 2, 1, 2, 3], [0, 0, 1, 1, 2, 2, 2])):
        kinds[..., place] = torch.tensor([*first, *[first[-1]] * (shape[-1] - len(first))])
    return {**batch, "token_type_ids": kinds}


def decoded(batch: Batch, scene: Scene, vocab: int, labels: bool = True, length: int = 5) -> Batch:
    """Labels, or decoder_input_ids with their mask; shorter than the encoder's sequence, ragged."""
    ids = scene.draw(min(3, vocab - 1), vocab, 2, length)
    mask = (torch.arange(length) < torch.tensor([[length], [length - 2]])).long()
    if labels:
        return {**batch, "labels": ids.masked_fill(mask == 0, -100)}
    return {**batch, "decoder_input_ids": ids.masked_fill(mask == 0, 0), "decoder_attention_mask": mask}


def translated(batch: Batch, scene: Scene) -> Batch:
    """What each head of an encoder-decoder takes beside the ids of the encoder."""
    head, config = scene.head, scene.config
    vocab = getattr(config, "decoder_vocab_size", None) or config.get_text_config(decoder=True).vocab_size
    if head.endswith(("ForSequenceClassification", "ForTokenClassification")):
        batch["labels"] = batch["labels"].clamp(max=config.num_labels - 1)
    if head.endswith("ForSequenceClassification"):  # it reads the state of the last eos
        last = batch["attention_mask"].sum(1, keepdim=True) - 1
        batch["input_ids"] = batch["input_ids"].scatter(1, last, config.eos_token_id)
    length = batch["input_ids"].shape[-1] - 2
    if head.endswith(("ForConditionalGeneration", "MarianMTModel", "EncoderDecoderModel")):
        return decoded(batch, scene, vocab, length=length)
    if head.endswith("Model") and not head.endswith("EncoderModel"):
        return decoded(batch, scene, vocab, labels=False, length=length)
    return batch


def sound(batch: Batch, scene: Scene, name: str, *shape: int) -> Batch:
    """Waves or spectrograms, with labels, of which some are for each frame that the convolutions leave."""
    config, draw = scene.config, scene.draw
    heard: Batch = {name: draw.normal(2, *shape), "attention_mask": ragged(shape[0])}
    if scene.head.endswith("ForCTC"):
        heard["labels"] = draw(1, config.vocab_size, 2, 4).masked_fill(ragged(4) == 0, -100)
    elif scene.head.endswith("ForAudioFrameClassification"):
        frames = shape[0]
        strides = getattr(config, "conv_stride", ())
        for kernel, stride in zip(getattr(config, "conv_kernel", ()), strides, strict=True):
            frames = (frames - kernel) // stride + 1
        heard["labels"] = torch.nn.functional.one_hot(draw(0, config.num_labels, 2, frames), config.num_labels)
    elif "labels" in batch and not scene.head.endswith("ForPreTraining"):
        heard["labels"] = batch["labels"]
    return heard


def heard(batch: Batch, scene: Scene, name: str, *shape: int, mask: bool = True) -> Batch:
    """Sound for the encoder, words for the decoder."""
    if scene.head.endswith("ForCausalLM"):
        return batch
    result: Batch = {name: scene.draw.normal(2, *shape)}
    if mask:
        result["attention_mask"] = ragged(shape[-2] if len(shape) == 2 else shape[-1])
    if scene.head.endswith("ForAudioClassification"):
        return {**result, "labels": batch["labels"]}
    vocab = scene.config.get_text_config(decoder=True).vocab_size
    return decoded(result, scene, vocab, labels="For" in scene.head or scene.head == "SpeechEncoderDecoderModel")


def with_sound(
    batch: Batch,
    scene: Scene,
    lengths: list[int],
    *shape: int,
    mask: str = "",
    heard: Sequence[int] = (32, 20),
    seq: int = 14,
) -> Batch:
    """Text with placeholders for ``lengths`` pieces of sound, and the sound."""
    config, place = scene.config, torch.arange(seq)
    attention = (place < torch.tensor([[seq], [seq - 2]])).long()
    of_sound = (place >= 2) & (place < torch.tensor(lengths)[:, None] + 2)
    ids = scene.draw(3, config.audio_token_id, 2, seq).masked_fill(attention == 0, 0)
    ids = ids.masked_fill(of_sound, config.audio_token_id)
    text = {"input_ids": ids, "attention_mask": attention, "input_features": scene.draw.normal(2, *shape)}
    if mask == "pieces":
        text["input_features_mask"] = torch.arange(lengths[0]) < torch.tensor(lengths)[:, None]
    elif mask:
        text[mask] = (torch.arange(heard[0]) < torch.tensor(heard)[:, None]).long()
    if scene.head.endswith("ForTokenClassification"):
        return {**text, "labels": scene.draw(0, config.num_labels, 2, seq).masked_fill(attention == 0, -100)}
    if scene.head.endswith("ForConditionalGeneration"):
        return {**text, "labels": ids.masked_fill((attention == 0) | of_sound, -100)}
    return text


def music(batch: Batch, scene: Scene) -> Batch:
    """MusicGen: codes of several books in rows of their own; states of a text in the place of an encoder."""
    config, draw = scene.config, scene.draw
    decoder = getattr(config, "decoder", config)
    codes = draw(0, decoder.vocab_size, 2, 5, decoder.num_codebooks)
    if scene.head.endswith("ForConditionalGeneration"):
        melody = {"input_features": draw.normal(2, 4, config.num_chroma)} if "Melody" in scene.head else {}
        return {**batch, **melody, "labels": codes.masked_fill(ragged(5)[..., None] == 0, -100)}
    text = {"encoder_hidden_states": draw.normal(2, 4, decoder.hidden_size)}
    if "Melody" not in scene.head:
        text["encoder_attention_mask"] = ragged(4)
    flat = codes.transpose(1, 2).reshape(-1, 5)
    labels = {"labels": codes} if "For" in scene.head else {}
    return {"input_ids": flat, "attention_mask": ragged(5), **text, **labels}


def seamless(batch: Batch, scene: Scene) -> Batch:
    """Seamless: text or sound for the encoder; states of text, and characters, for the models of units."""
    head, config, draw = scene.head, scene.config, scene.draw
    if "TextToUnit" in head:  # its encoder has no embeddings
        mask = batch["attention_mask"]
        states = {"inputs_embeds": draw.normal(2, 7, config.hidden_size), "attention_mask": mask}
        if "v2" in head:
            counts = draw(1, 3, 2, 7) * mask
            characters = draw(0, 23, 2, int(counts.sum(1).max()))
            return {**states, "char_input_ids": characters, "char_count_per_id": counts}
        return decoded(states, scene, config.t2u_vocab_size, labels="For" in head)
    sound = {"input_features": draw.normal(2, 40, 12), "attention_mask": ragged(40)}
    text = {name: batch[name] for name in ("input_ids", "attention_mask")}
    return decoded(text if "TextTo" in head else sound, scene, config.vocab_size)


def images(batch: Batch, scene: Scene, size: int = 12, video: bool = False, patches: int = 9) -> Batch:
    """Pixels of one size, and what the head wants beside them; ``patches``: how many a masked model sees."""
    head, config, draw = scene.head, scene.config, scene.draw
    batch = {"pixel_values": draw.normal(2, *([config.num_frames] if video else []), 3, size, size)}
    if head.endswith(("ForImageClassification", "ForVideoClassification")):
        batch["labels"] = draw(0, 3, 2)
    elif head.endswith(("ForMaskedImageModeling", "VideoMAEForPreTraining")):
        masked = torch.zeros(2, patches, dtype=torch.bool)
        masked[0, : patches // 2] = masked[1, 1 : patches // 2 + 1] = True
        batch["bool_masked_pos"] = masked
        if head.startswith("Beit"):
            batch["labels"] = draw(0, config.vocab_size, int(masked.sum()))
    elif head.endswith("ForSemanticSegmentation"):
        batch["labels"] = draw(0, 3, 2, size, size)
    elif head.endswith("ForPreTraining"):
        batch["noise"] = draw.normal(2, patches)
    return batch


def image_words(batch: Batch, scene: Scene, tokens: int, *masks: str, of: str = "") -> Batch:
    """Text with the placeholders of one image after the first token."""
    config = getattr(scene.config, of) if of else scene.config
    special = config.get_text_config().vocab_size - _SPECIAL
    ids = torch.where(batch["input_ids"] >= special, 5, batch["input_ids"])
    labels = batch.pop("labels", None)
    batch = insert({**batch, "input_ids": ids}, scene, config.image_token_id, tokens)
    of_image = batch["input_ids"] == config.image_token_id
    batch |= {name: of_image.long() for name in masks}
    if scene.head.endswith("ForSequenceClassification"):
        batch["labels"] = labels
    elif "For" in scene.head:
        batch["labels"] = batch["input_ids"].masked_fill((batch["attention_mask"] == 0) | of_image, -100)
    return batch


_ALL = (
    *(merged_images, stand_in, put, insert, longer, global_words, boxes, relations, table),
    *(decoded, translated, sound, heard, with_sound, music, seamless, images, image_words),
)
STEPS: dict[str, Callable[..., Batch]] = {each.__name__: each for each in _ALL}
