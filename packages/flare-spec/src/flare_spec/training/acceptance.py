"""How many drafted tokens a target accepts: as its distributions say, and as greedy rounds turn out.

Both go over texts that the target wrote, so that nothing is generated: a greedy round accepts what the greedy text
says. One result a conversation, so that drafters are compared over the same ones. Source: DSpark (arXiv 2607.05147).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  the name everyone knows

from flare_core.compute.sharded_model import ShardedModel
from flare_spec.dspark.context import ContextStore
from flare_spec.dspark.draft import DraftNoise, draft_block
from flare_spec.dspark.training_data import Blocks, TrainingBatch, make_blocks, sample_anchors
from flare_spec.dspark.training_model import Trainee
from flare_spec.dspark.weights import BlockDraft
from flare_spec.training.conversations import Conversation
from flare_spec.training.target_pass import target_batch

__all__ = ["Acceptance", "expected_acceptance", "greedy_acceptance"]

_ROWS_AT_ONCE = 1024
"""Rows over the vocabulary that are compared at once, which bounds their memory."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Rounds of one conversation.

    Attributes:
        num_rounds: rounds that drafted, or that were looked at.
        length: mean tokens a round, the one that the target adds included.
        reached: [gamma], rounds in which the k-th drafted token was tried: all before it were accepted.
        accepted: [gamma], rounds in which it was accepted; expected numbers where chances are summed.
    """

    num_rounds: int
    length: float
    reached: tuple[float, ...]
    accepted: tuple[float, ...]


@torch.no_grad()
def expected_acceptance(
    model: ShardedModel,
    trainee: Trainee,
    conversation: Conversation,
    *,
    temperature: float,
    num_anchors: int,
    use_markov: bool = True,
) -> Acceptance | None:
    """What rejection sampling at ``temperature`` accepts, by 1 - TV(p, q) at each place of ``num_anchors`` blocks.

    The tokens before a place are the conversation's. Blocks that reach over its end are not looked at; None where
    there is no other. ``use_markov`` False leaves the Markov head out.
    """
    gamma = trainee.config.gamma
    batch = target_batch(model, trainee.config.taps, [conversation])
    anchors, is_anchor = sample_anchors(batch.is_answer, num_anchors, torch.Generator().manual_seed(0))
    anchors = anchors[is_anchor & (anchors + gamma < batch.tokens.shape[1])].unsqueeze(0)
    if not anchors.numel():
        return None
    blocks = make_blocks(batch, anchors, torch.ones_like(anchors, dtype=torch.bool), gamma)
    chances = _chances(model, trainee, batch, blocks, temperature=temperature, use_markov=use_markov)
    reached = chances.cumprod(dim=1)
    before = torch.cat([torch.ones_like(reached[:, :1]), reached[:, :-1]], dim=1)
    return Acceptance(
        num_rounds=len(chances),
        length=1 + reached.sum(dim=1).mean().item(),
        reached=tuple(before.sum(dim=0).tolist()),
        accepted=tuple(reached.sum(dim=0).tolist()),
    )


def _chances(
    model: ShardedModel,
    trainee: Trainee,
    batch: TrainingBatch,
    blocks: Blocks,
    *,
    temperature: float,
    use_markov: bool,
) -> torch.Tensor:
    """[A, gamma]: 1 - TV at each place of the blocks of one conversation."""
    rows = trainee.rows(batch.taps, blocks, model.embedding)
    operands, _ = trainee.markov(rows, blocks)
    gamma = rows.shape[2]
    before = blocks.anchors[0].unsqueeze(1) + torch.arange(gamma, device=rows.device)
    parts = zip(
        torch.split(rows[0].flatten(0, 1), _ROWS_AT_ONCE),
        torch.split(operands[0].flatten(0, 1), _ROWS_AT_ONCE),
        torch.split(batch.rows[0, before].flatten(0, 1), _ROWS_AT_ONCE),
        strict=True,
    )
    head = model.head.weight
    chances = []
    for drafted, operand, true in parts:
        logits = F.linear(drafted.to(head.dtype), head).float()
        if use_markov and operand.shape[1]:
            logits += F.linear(operand, trainee.parameters["markov_head.markov_w2.weight"])
        proposal = (logits / temperature).softmax(dim=-1)
        target = (F.linear(true, head).float() / temperature).softmax(dim=-1)
        chances.append(torch.minimum(proposal, target).sum(dim=-1))
    return torch.cat(chances).view(-1, gamma).clamp(max=1.0)


@torch.no_grad()
def greedy_acceptance(
    model: ShardedModel, draft: BlockDraft, conversations: Sequence[Conversation], *, use_markov: bool = True
) -> list[Acceptance]:
    """What greedy rounds accept of ``conversations``, whose answers are the target's greedy ones; one result each.

    Rounds are those of a server: each begins at the token that the target added to the last. One that reaches over
    the end of the answer counts what there is. An answer of one token has no round.
    """
    if not use_markov:
        # The confidence head may read the Markov embedding; nothing here asks it.
        draft = dataclasses.replace(draft, markov=None, confidence=None)
    walks = [_Walk.begin(model, draft, each) for each in conversations]
    while going := [walk for walk in walks if walk.is_going]:
        drafted = draft_block(
            draft,
            [walk.context for walk in going],
            torch.tensor([walk.anchor for walk in going], device=model.embedding.device),
            num_tokens=draft.config.gamma,
            noise=_greedy(len(going), model.embedding.device),
            embed=lambda ids: F.embedding(ids, model.embedding).to(draft.backbone.fuse.weight.dtype),
            base_scores=lambda rows: (F.linear(rows.to(model.head.weight.dtype), model.head.weight).bfloat16(), None),
        )
        for walk, tokens in zip(going, drafted.sampled.tokens.tolist(), strict=True):
            walk.take(draft, tokens)
    return [walk.result() for walk in walks]


def _greedy(count: int, device: torch.device) -> DraftNoise:
    return DraftNoise(torch.zeros(count, device=device), torch.zeros(count, dtype=torch.int64, device=device))


@dataclass(slots=True)
class _Walk:
    """One conversation and how far its rounds have come; ``position`` is the anchor's, up to which all is known."""

    conversation: Conversation
    taps: torch.Tensor
    context: ContextStore
    position: int
    lengths: list[int]
    reached: list[int]
    accepted: list[int]

    @classmethod
    def begin(cls, model: ShardedModel, draft: BlockDraft, conversation: Conversation) -> _Walk:
        """The prompt is known, and the first token of the answer, which the target gives with it."""
        taps = target_batch(model, draft.config.taps, [conversation]).taps[0].to(draft.backbone.fuse.weight.dtype)
        context = draft.backbone.new_context()
        draft.backbone.extend(context, draft.backbone.context_rows(taps[: conversation.num_prompt_tokens]))
        nothing = [0] * draft.config.gamma
        return cls(conversation, taps, context, conversation.num_prompt_tokens, [], list(nothing), list(nothing))

    @property
    def is_going(self) -> bool:
        return self.position + 1 < len(self.conversation.tokens)

    @property
    def anchor(self) -> int:
        return self.conversation.tokens[self.position]

    def take(self, draft: BlockDraft, tokens: Sequence[int]) -> None:
        """One round, in which ``tokens`` were drafted."""
        rest = self.conversation.tokens[self.position + 1 :]
        count = 0
        for place, (token, true) in enumerate(zip(tokens, rest, strict=False)):
            self.reached[place] += 1
            if token != true:
                break
            self.accepted[place] += 1
            count += 1
        self.lengths.append(min(count + 1, len(rest)))
        stop = min(self.position + count + 1, len(self.conversation.tokens) - 1)
        draft.backbone.extend(self.context, draft.backbone.context_rows(self.taps[self.position : stop]))
        self.position = stop

    def result(self) -> Acceptance:
        rounds = len(self.lengths)
        return Acceptance(
            rounds,
            sum(self.lengths) / max(1, rounds),
            tuple(map(float, self.reached)),
            tuple(map(float, self.accepted)),
        )
