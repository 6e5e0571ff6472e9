"""The small tokenizers and the frozen text encoders keep captions apart."""

from __future__ import annotations

import torch

from workflow_rl.embedded import architectures, tokenizers, world

CAPTIONS = [str(caption) for caption in world.all_captions()]


def test_every_caption_word_is_one_token() -> None:
    clip, t5 = tokenizers.clip_tokenizer(), tokenizers.t5_tokenizer()
    for caption in CAPTIONS:
        assert len(clip.tokenize(caption)) == 5
        assert len(t5.tokenize(caption)) == 5
    for placed in world.placed_captions():
        assert len(clip.tokenize(str(placed))) == 8
        assert len(t5.tokenize(str(placed))) == 8


def test_unknown_words_are_spelled() -> None:
    assert "zoom" in "".join(tokenizers.t5_tokenizer().tokenize("zoom"))
    assert len(tokenizers.clip_tokenizer().tokenize("zoom")) == 4


def test_pooled_and_sequence_embeddings_separate_all_captions() -> None:
    torch.manual_seed(0)
    clip, t5 = tokenizers.clip_tokenizer(), tokenizers.t5_tokenizer()
    with torch.no_grad():
        for embeddings in (
            architectures.clip_text_encoder(clip)(
                clip(CAPTIONS, padding="max_length", return_tensors="pt").input_ids
            ).pooler_output,
            architectures.t5_text_encoder(t5)(
                t5(CAPTIONS, padding="max_length", return_tensors="pt").input_ids
            ).last_hidden_state.flatten(1),
        ):
            distance = torch.cdist(embeddings, embeddings)
            distance.fill_diagonal_(torch.inf)
            assert distance.min() > 0.09 * embeddings.norm(dim=1).mean()
