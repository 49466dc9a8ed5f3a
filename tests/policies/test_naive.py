"""The scores that are more than a line, against plain loops in float64 written from the definitions."""

import math

import pytest
import torch
from policy_views import GROUP, HEAD_SIZE, NUM_HEADS, bare_view, random_view, shuffled

from policies import Phase, build_policy

BUDGET, BLOCK = 32, 16


def case(name, num_extra=30, seed=0, **options):
    policy = build_policy(name, budget=BUDGET, block_size=BLOCK, options=options)
    """A prompt whose tokens lie in shuffled slots, so that an order taken from slots would show."""
    view, _ = shuffled(random_view(policy, Phase.PREFILL_END, 1, num_extra, seed), seed)
    return policy, view


def to_slots(by_position, view):
    """[H][position] -> [1, H, T] in slot order, while every position is resident."""
    return torch.tensor(by_position)[None, :, view.positions[0, 0]].float()


def in_order(x, view):
    """[1, H, T, D] -> float64 [H, T, D] in the order of positions."""
    return x[0][:, view.positions[0, 0].argsort()].double()


def naive_window_attention(view, query_head):
    """Attention that each position receives from each query of the window, lists [W][T]."""
    keys = in_order(view.keys, view)[query_head // GROUP]
    queries = view.window_queries[0, query_head].double()
    num_tokens, rows = len(keys), []
    for j, query in enumerate(queries):
        position = num_tokens - len(queries) + j
        weights = [math.exp(float(query @ keys[i]) / math.sqrt(HEAD_SIZE)) for i in range(position + 1)]
        rows.append([w / sum(weights) for w in weights] + [0.0] * (num_tokens - position - 1))
    return rows


def received(view, query_head):
    """Sum over the window."""
    return [sum(column) for column in zip(*naive_window_attention(view, query_head), strict=True)]


def l1_norms(view, head):
    return [float(v.abs().sum()) for v in in_order(view.values, view)[head]]


@pytest.mark.parametrize("pooling", ["avg", "max"])
@pytest.mark.parametrize("group", ["mean", "max"])
@pytest.mark.parametrize("value_weighted", [False, True])
def test_snapkv(pooling, group, value_weighted):
    window, kernel = 6, 5
    options = {"pooling": pooling, "group": group, "value_weighted": value_weighted}
    policy, view = case("snapkv", window=window, kernel=kernel, **options)
    expected = []
    for head in range(NUM_HEADS):
        per_query_head = []
        for query_head in range(head * GROUP, (head + 1) * GROUP):
            older = received(view, query_head)[:-window]
            pooled = []
            for i in range(len(older)):
                around = older[max(0, i - kernel // 2) : i + kernel // 2 + 1]
                pooled.append(sum(around) / kernel if pooling == "avg" else max(around))
            per_query_head.append(pooled + [0.0] * window)
        reduce = max if group == "max" else lambda xs: sum(xs) / len(xs)
        row = [reduce(scores) for scores in zip(*per_query_head, strict=True)]
        if value_weighted:
            row = [score * norm for score, norm in zip(row, l1_norms(view, head), strict=True)]
        expected.append(row)
    torch.testing.assert_close(policy.score(view), to_slots(expected, view), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("value_weighted", [False, True])
def test_chunkkv(value_weighted):
    window, length = 5, 7
    policy, view = case("chunkkv", window=window, chunk_length=length, value_weighted=value_weighted)
    heads = []
    for head in range(NUM_HEADS):
        rows = [received(view, query_head) for query_head in range(head * GROUP, (head + 1) * GROUP)]
        row = [sum(column) / GROUP for column in zip(*rows, strict=True)]
        if value_weighted:
            row = [score * norm for score, norm in zip(row, l1_norms(view, head), strict=True)]
        heads.append(row)
    older = [sum(column) / NUM_HEADS for column in zip(*heads, strict=True)][:-window]
    expected = []
    for start in range(0, len(older), length):
        chunk = older[start : start + length]
        expected += [sum(chunk) / len(chunk)] * len(chunk)
    scores = policy.score(view)
    torch.testing.assert_close(scores, to_slots([expected + [0.0] * window], view), rtol=1e-4, atol=1e-6)
    assert len(scores.unique()) == math.ceil(len(older) / length) + 1


@pytest.mark.parametrize("value_weighted", [False, True])
def test_tova(value_weighted):
    policy, view = case("tova", value_weighted=value_weighted)
    expected = []
    for head in range(NUM_HEADS):
        rows = view.newest_attention[0, head][:, view.positions[0, 0].argsort()].tolist()
        norms = l1_norms(view, head) if value_weighted else [1.0] * len(rows[0])
        expected.append(
            [sum(column) / GROUP * norm for column, norm in zip(zip(*rows, strict=True), norms, strict=True)]
        )
    torch.testing.assert_close(policy.score(view), to_slots(expected, view), rtol=1e-4, atol=1e-6)


def rotate(vector, position, inv_freq):
    """Rotary embedding of one vector, halves layout."""
    half, out = len(vector) // 2, [0.0] * len(vector)
    for i in range(half):
        angle = position * float(inv_freq[i])
        a, b = vector[i], vector[i + half]
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def mean_rotation(num_seen, num_future, inv_freq):
    """Columns are the averaged images of the unit vectors."""
    columns = []
    for unit in torch.eye(HEAD_SIZE).tolist():
        images = [rotate(unit, num_seen + step, inv_freq) for step in range(num_future)]
        columns.append([sum(x) / num_future for x in zip(*images, strict=True)])
    return torch.tensor(columns, dtype=torch.float64).T


@pytest.mark.parametrize("use_covariance", [True, False])
@pytest.mark.parametrize("epsilon", [0.0, 0.01])
def test_expected_attention(use_covariance, epsilon):
    options = {"num_future": 9, "epsilon": epsilon, "use_covariance": use_covariance}
    policy, view = case("expected_attention", **options)
    rotation = mean_rotation(int(view.num_seen[0]), 9, view.inv_freq)
    expected = []
    for head in range(NUM_HEADS):
        keys, values = (in_order(x, view)[head] for x in (view.keys, view.values))
        attention = [0.0] * len(keys)
        for query_head in range(head * GROUP, (head + 1) * GROUP):
            mean = rotation @ view.query_mean[0, query_head].double()
            cov = rotation @ view.query_cov[0, query_head].double() @ rotation.T
            weights = [0.0] * policy.protect_first
            for key in keys[policy.protect_first :]:
                logit = float(mean @ key) / math.sqrt(HEAD_SIZE)
                logit += float(key @ cov @ key) / (2 * HEAD_SIZE) if use_covariance else 0.0
                weights.append(math.exp(logit))
            attention = [a + w / sum(weights) / GROUP for a, w in zip(attention, weights, strict=True)]
        expected.append([(a + epsilon) * float(v.norm()) for a, v in zip(attention, values, strict=True)])
    torch.testing.assert_close(policy.score(view), to_slots(expected, view), rtol=1e-4, atol=1e-6)


def test_expected_attention_is_what_gaussian_queries_pay_on_average():
    """Without rotation and with one query head: exp(z_i) is E[exp(q.k_i / sqrt(D))], here by sampling."""
    generator = torch.Generator().manual_seed(1)
    keys, root = torch.randn(40, 4, generator=generator), torch.randn(4, 4, generator=generator) / 2
    mean, cov = torch.randn(4, generator=generator), root @ root.mT
    policy = build_policy("expected_attention", budget=BUDGET, block_size=BLOCK, options={"protect_first": 0})
    view = bare_view(
        keys=keys[None, None],
        values=torch.ones(1, 1, 40, 1),
        query_mean=mean[None, None],
        query_cov=cov[None, None],
        inv_freq=torch.zeros(2),
    )
    draws = mean + torch.randn(300_000, 4, generator=generator) @ root.mT
    paid = (draws @ keys.mT / 2).exp().mean(dim=0)
    torch.testing.assert_close(policy.score(view)[0, 0], paid / paid.sum(), rtol=0.05, atol=1e-4)


def naive_standing(states, start, lag):
    """LagKV of one lag: softmax over its tokens of the spread over channels, relative to the next lag."""
    spreads = []
    for token in states[start : start + lag]:
        relative = []
        for channel, x in enumerate(token.tolist()):
            reference = states[start + lag : start + 2 * lag, channel].tolist()
            relative.append((x - min(reference)) / (max(reference) - min(reference)))
        mean = sum(relative) / len(relative)
        spreads.append(math.sqrt(sum((x - mean) ** 2 for x in relative) / (len(relative) - 1)))
    weights = [math.exp(spread) for spread in spreads]
    return [w / sum(weights) for w in weights]


def test_lagkv():
    lag, sinks = 6, 3
    policy, view = case("lagkv", lag=lag, protect_first=sinks)
    num_tokens = view.positions.shape[-1]
    num_lags = (num_tokens - sinks) // lag
    expected = []
    for head in range(NUM_HEADS):
        row = [1.0] * num_tokens
        for start in range(sinks, sinks + (num_lags - 1) * lag, lag):
            parts = [naive_standing(in_order(x, view)[head], start, lag) for x in (view.keys, view.values)]
            standing = [k + v for k, v in zip(*parts, strict=True)]
            for rank, i in enumerate(sorted(range(lag), key=standing.__getitem__)):
                row[start + i] = rank / lag
        expected.append(row)
    torch.testing.assert_close(policy.score(view), to_slots(expected, view))
