import pytest
import torch

from examples.deepspeed_gpt.settings import Settings
from examples.support.model import GPT, GPTConfig

SMALL = GPTConfig(layers=3, hidden=32, heads=2, sequence=16, dropout=0.1)


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (2, 16), generator=generator), torch.randint(256, (2, 16), generator=generator)


def test_the_demo_trains_10_to_25_million_parameters_in_12_layers() -> None:
    config = Settings().model
    assert config.layers == 12
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in GPT(config).parameters())
    assert 10e6 < parameters < 25e6


def test_no_token_sees_what_follows_it() -> None:
    torch.manual_seed(0)
    model = GPT(SMALL).eval()
    logits: list[torch.Tensor] = []
    model.head.register_forward_hook(lambda _module, _inputs, output: logits.append(output))
    tokens, targets = batch()
    model(tokens, targets)
    changed = tokens.clone()
    changed[:, 10:] = batch(seed=1)[0][:, 10:]
    model(changed, targets)
    assert torch.equal(logits[0][:, :10], logits[1][:, :10])
    assert not torch.equal(logits[0][:, 10:], logits[1][:, 10:])


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="hidden 30 is not a multiple of heads 4"):
        GPTConfig(hidden=30, heads=4)
    with pytest.raises(ValueError, match="recomputed_blocks 4 is not between 0 and layers 3"):
        GPT(SMALL, recomputed_blocks=4)
