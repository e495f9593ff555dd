"""Train an EAGLE-style drafter of one layer on a model's own greedy answers, and save it as a checkpoint.

    python benchmarks/cpu/train_drafter.py MODEL.gguf OUT --prompts 1344 --seconds 720

1. pagoda answers questions that are combined of subjects and forms; one subject in eight is kept for the evaluation.
2. transformers computes the model's hidden states of prompts and answers.
3. One layer of the model's block learns, from the embedding of the next token and the hidden state, the hidden state
   after it (smooth L1) and the token that the model's head reads from that (cross entropy, over the tokens that occur);
   then the same from its own hidden states, as in a chain of guesses (arXiv 2401.15077, 2503.01840).

OUT has config.json and model.safetensors in EAGLE's format, and the subjects that were kept, in held_out.json.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FORMS: Final = (
    "What is {}?",
    "Explain {} to a child.",
    "Write a short story about {}.",
    "List five facts about {}.",
    "Why does {} matter?",
    "Describe {} in two sentences.",
    "What are the advantages and disadvantages of {}?",
    "Write an email to a friend about {}.",
    "How would you teach {} to beginners?",
    "Give me three questions about {} with answers.",
    "Tell me something surprising about {}.",
    "Write a poem about {}.",
    "What should a visitor know about {}?",
    "Compare {} with something similar.",
    "Who first became interested in {}, and why?",
    "Write the beginning of a novel about {}.",
    "Plan a school lesson about {}.",
    "What mistakes do people make about {}?",
    "How has {} changed over the last century?",
    "Write a dialogue between two people about {}.",
    "Define {} in one sentence, then give an example.",
    "What would the world be without {}?",
    "Give advice to somebody who wants to learn about {}.",
    "Summarise the history of {}.",
)
_NAMES: Final = (
    "photosynthesis|the French Revolution|a lighthouse|prime numbers|bread|the moon|volcanoes|democracy|the internet|"
    "gravity|a lost dog|coffee|electric cars|the Roman Empire|chess|rainbows|the human heart|a haunted house|"
    "recycling|dinosaurs|the stock market|Python|a sailing trip|climate change|vaccines|the Great Wall of China|jazz|"
    "bees|black holes|a robot|football|the water cycle|Shakespeare|a desert|cheese|earthquakes|money|sleep|"
    "the Amazon|bicycles|an old library|magnets|the Olympic Games|mushrooms|inflation|a snowstorm|DNA|yoga|trains|"
    "the ocean|fractions|a dragon|the printing press|spices|elections|penguins|glass|the piano|evolution|"
    "a birthday party|solar energy|maps|the Vikings|tea"
)
SUBJECTS: Final = tuple(_NAMES.split("|"))


def questions(held_out: bool) -> list[str]:
    """Return every question about the subjects that are, or are not, kept for the evaluation."""
    subjects = [each for number, each in enumerate(SUBJECTS) if (number % 8 == 7) == held_out]
    return [form.format(subject) for subject in subjects for form in FORMS]


@dataclass(frozen=True)
class Answered:
    """Token ids of a prompt and its answer."""

    token_ids: list[int]
    num_prompt: int


def answers(model: str, prompts: list[str], length: int) -> list[Answered]:
    """Return the model's own greedy answers."""
    from pagoda import LLM, SamplingParams

    llm = LLM(model=model, backend="reference", max_model_len=512, max_num_seqs=32)
    chats: list[Any] = [[{"role": "user", "content": prompt}] for prompt in prompts]
    outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=length), use_tqdm=False)
    answered = []
    for output in outputs:
        prompt = list(output.prompt_token_ids or ())
        answered.append(Answered([*prompt, *output.outputs[0].token_ids], len(prompt)))
    return answered


@torch.inference_mode()
def hidden_states(model: Any, answered: list[Answered]) -> list[Tensor]:
    """Return what the model's head reads, [T, D] of each sequence in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16):
        return [model.model(torch.tensor([each.token_ids])).last_hidden_state[0].bfloat16() for each in answered]


class Drafter(nn.Module):
    """EAGLE's drafter; names of the parameters are those of its checkpoints."""

    def __init__(self, model: Any, scale: float) -> None:
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

        config = model.config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size)
        layer = LlamaDecoderLayer(config, 0)
        layer.load_state_dict(model.model.layers[-1].state_dict())
        layer.input_layernorm = nn.Identity()
        self.layers = nn.ModuleList([layer])
        self.rotary = LlamaRotaryEmbedding(config)
        self._begin_as(model.model.layers[-1], scale)

    @torch.no_grad()
    def _begin_as(self, last: Any, scale: float) -> None:
        """Begin as the model's last layer over its hidden state, whose root mean square is `scale`.

        The layer has no norm before its attention, so that q, k and v take it over; what it adds is of that scale, too.
        """
        width, layer = self.fc.out_features, self.layers[0]
        self.fc.weight.zero_()
        self.fc.weight[:, width:].copy_(torch.eye(width))
        self.fc.bias.zero_()
        for part in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            part.weight.mul_(last.input_layernorm.weight / scale)
        for part in (layer.self_attn.o_proj, layer.mlp.down_proj):
            part.weight.mul_(0.1 * scale)

    def forward(self, embeds: Tensor, features: Tensor, mask: Tensor) -> Tensor:
        """embeds, features [S, T, D], mask [S, 1, T, T] -> features of the next position [S, T, D]."""
        x = self.fc(torch.cat([embeds, features], -1))
        positions = torch.arange(x.shape[1])[None]
        return self.layers[0](
            x, attention_mask=mask, position_ids=positions, position_embeddings=self.rotary(x, positions)
        )


@dataclass(frozen=True)
class Batch:
    """Sequences of one length, after padding."""

    embeds: Tensor  # [S, T, D] of the token after each position
    features: Tensor  # [S, T, D] of the model
    following: Tensor  # [S, T, D] of the model, a position later
    labels: Tensor  # [S, T] number of the token two positions later among the tokens that occur, -100 for none
    weights: Tensor  # [S, T] 1 where the model generated, 0.1 in the prompt, 0 in the padding
    mask: Tensor  # [S, 1, T, T]


def make_batch(answered: list[Answered], hidden: list[Tensor], table: Tensor, number_of: Tensor) -> Batch:
    length = max(len(each.token_ids) for each in answered) - 1
    width = table.shape[1]
    count = len(answered)
    embeds, features, following = (torch.zeros(count, length, width) for _ in range(3))
    labels, weights = torch.full((count, length), -100), torch.zeros(count, length)
    for row, (each, states) in enumerate(zip(answered, hidden)):
        ids, end = torch.tensor(each.token_ids), len(each.token_ids) - 1
        embeds[row, :end], features[row, :end] = table[ids[1:]], states[:end].float()
        following[row, :end] = states[1:].float()
        labels[row, : end - 1] = number_of[ids[2:]]
        weights[row, : end - 1] = 0.1
        weights[row, max(0, each.num_prompt - 2) : end - 1] = 1
    mask = torch.full((length, length), float("-inf")).triu(1)[None, None].expand(count, 1, -1, -1)
    return Batch(embeds, features, following, labels, weights, mask)


def loss_of(drafter: Drafter, batch: Batch, head: Tensor) -> tuple[Tensor, list[float]]:
    """Return the loss of a chain of two guesses, and the share of right ones of each."""
    features, embeds, total, right = batch.features, batch.embeds, torch.zeros(()), []
    following, labels, weights = batch.following, batch.labels, batch.weights
    for _ in range(2):
        guessed = drafter(embeds, features, batch.mask[:, :, : embeds.shape[1], : embeds.shape[1]])
        used = weights > 0
        logits = guessed[used] @ head.T
        share = weights[used] / weights[used].sum()
        total = total + (F.cross_entropy(logits, labels[used], reduction="none") * share).sum()
        scale = following[used].square().mean().sqrt()
        distance = F.smooth_l1_loss(guessed[used] / scale, following[used] / scale, reduction="none").mean(-1)
        total = total + (distance * share).sum()
        answer = weights[used] == 1
        right.append(float((logits.argmax(-1) == labels[used])[answer].float().mean()))
        # The next guess reads the drafter's own hidden state, one position later.
        features, embeds, following = guessed[:, :-1], embeds[:, 1:], following[:, 1:]
        labels, weights = labels[:, 1:], weights[:, 1:]
    return total, right


def train(
    drafter: Drafter, model: Any, answered: list[Answered], hidden: list[Tensor], seconds: float, seed: int = 0
) -> None:
    """Train for some time, the learning rate falling over it."""
    occurring = torch.tensor(sorted({token for each in answered for token in each.token_ids}))
    table = model.get_input_embeddings().weight.detach()
    head = model.get_output_embeddings().weight.detach()[occurring]
    number_of = torch.full((table.shape[0],), -100)
    number_of[occurring] = torch.arange(len(occurring))
    order, shuffle = sorted(range(len(answered)), key=lambda i: len(answered[i].token_ids)), random.Random(seed)
    batches = [order[at : at + 8] for at in range(0, len(order), 8)]
    optimiser = torch.optim.AdamW(drafter.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)
    began, steps = time.monotonic(), 0
    while (passed := (time.monotonic() - began) / seconds) < 1:
        shuffle.shuffle(batches)
        rights = []
        for rows in batches:
            if (passed := (time.monotonic() - began) / seconds) >= 1:
                break
            for group in optimiser.param_groups:
                group["lr"] = 1e-3 * min(1, (steps + 1) / 20) * max(0.02, 1 - passed)
            batch = make_batch([answered[i] for i in rows], [hidden[i] for i in rows], table, number_of)
            with torch.autocast("cpu", torch.bfloat16):
                loss, right = loss_of(drafter, batch, head)
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(drafter.parameters(), 0.5)
            optimiser.step()
            steps += 1
            rights.append(right)
        means = [sum(column) / len(rights) for column in zip(*rights)] if rights else []
        print(f"{passed:.0%}: {steps} steps, right {', '.join(f'{mean:.1%}' for mean in means)}", flush=True)


def save(drafter: Drafter, model: Any, folder: Path) -> None:
    """Write the drafter in EAGLE's format, in bfloat16."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads(model.config.to_json_string())
    config |= {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
    for key in ("layer_types", "quantization_config"):
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tensors = {name: value.detach().bfloat16().contiguous() for name, value in drafter.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "held_out.json").write_text(json.dumps(questions(held_out=True), indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="GGUF file of a Llama-like model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompts", type=int, default=1344)
    parser.add_argument("--length", type=int, default=96, help="tokens of an answer")
    parser.add_argument("--seconds", type=float, default=720, help="of training alone")
    args = parser.parse_args()
    began = time.monotonic()
    prompts = questions(held_out=False)
    random.Random(0).shuffle(prompts)
    answered = answers(str(args.model), prompts[: args.prompts], args.length)
    print(f"{len(answered)} answers: {time.monotonic() - began:.0f} s", flush=True)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(args.model.parent, gguf_file=args.model.name, dtype=torch.float32)
    hidden = hidden_states(model.eval(), answered)
    scale = float(torch.cat(hidden).float().square().mean().sqrt())
    print(f"hidden states of {sum(map(len, hidden))} tokens: {time.monotonic() - began:.0f} s", flush=True)
    drafter = Drafter(model, scale).train()
    train(drafter, model, answered, hidden, args.seconds)
    save(drafter, model, args.out)
    print(f"{sum(p.numel() for p in drafter.parameters())} parameters in {args.out}, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
