"""Built-in rewards compared with hand calculation, real labels, VADER's scores and transformers' forward pass."""

import json
import math
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    RobertaConfig,
)

from nlgrpo.rewards.builtin import final_answer, vote
from nlgrpo.rewards.specs import load_reward


def function(spec):
    return load_reward("r", spec).function


def chat(text, role="assistant"):
    return [{"role": role, "content": text}]


# ---- length ----


def test_length_follows_the_equation_of_the_paper():
    ids = [[1] * length for length in (0, 50, 150, 256)]
    assert function("length(target=50, scale=256)")(completion_ids=ids) == pytest.approx(
        [-2500 / 65536, 0, -10000 / 65536, -42436 / 65536]
    )


@pytest.mark.parametrize("arguments", ["target=1, scale=-2", "target=1e999, scale=2", "target=True, scale=2"])
def test_length_refuses_bad_arguments(arguments):
    with pytest.raises(ValueError, match=r"target must be a number|scale must be above 0"):
        load_reward("r", f"length({arguments})")


# ---- lexicon ----


@pytest.fixture
def lexicon(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text(
        "good\t2\t0.5\nBad\t-3\nfed up\t-2\n:)\t1.5\n:-)\t1\n:-))\t4\n:/\t-1\nx-d\t2.5\n8)\t0.5\ncan't\t-0.5\n"
        "well-made\t3\nmade\t-1\n\n"
    )
    return path


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("good", [2]),
        ("GOOD, bad; 'Good'!!! (good) _good_ ...bad...good", [2, -3, 2, 2, 2, -3, 2]),
        ("goods badly unmade", []),
        ("I am FED UP.", [-2]),
        ("fed upon, unfed up", []),
        ("well :)", [1.5]),
        ('good:) ":)" :). (:-)', [2, 1.5, 1.5, 1.5, 1]),
        ("yes :-)) and :-)", [4, 1]),
        ("see http://good.org", [2]),
        ("hm :/", [-1]),
        ("xD x-D ax-d", [2.5]),
        ("18) and 8)", [0.5]),
        ("I can’t, I can't", [-0.5, -0.5]),
        ("well-made, hand-made, good-bad", [3, -1, 2, -3]),
        ("", []),
        ("\U0001f600 \t\n", []),
    ],
)
def test_lexicon_scores_words_and_signs(lexicon, text, found):
    total = sum(found)
    compound = function(f"lexicon(path={str(lexicon)!r})")(completions=[text, chat(text)])
    assert compound == pytest.approx([total / math.sqrt(total**2 + 15)] * 2)
    mean = function(f"lexicon(path={str(lexicon)!r}, normalize='mean')")(completions=[text])
    assert mean == pytest.approx([total / len(found) if found else 0])


def test_lexicon_equals_vader_where_its_heuristics_do_not_apply(shared):
    """Compound scores from vaderSentiment 3.3.2."""
    truth = {
        "The film is good , funny and charming .": 0.8625,
        "a dull , lifeless and boring story": -0.6124,
        "The film is lovely :)": 0.7783,
        "What a disaster. Terrible acting and a stupid plot": -0.891,
        "the chairs are made of wood": 0.0,
    }
    scores = function(f"lexicon(path={str(shared / 'data/vader/vader_lexicon.txt')!r})")(completions=list(truth))
    assert scores == pytest.approx(list(truth.values()), abs=5e-5)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("good 2\n", "line 1"),
        ("a\t1\nb\tx\n", "line 2"),
        ("a\tnan\n", "line 1"),
        ("\t1\n", "line 1"),
        ("\n", "is empty"),
    ],
)
def test_bad_lexicons_are_refused(tmp_path, content, says):
    path = tmp_path / "words.txt"
    path.write_text(content)
    with pytest.raises(ValueError, match=says):
        load_reward("r", f"lexicon(path={str(path)!r})")


def test_lexicon_refuses_bad_arguments(lexicon):
    with pytest.raises(ValueError, match="no lexicon file"):
        load_reward("r", "lexicon(path='nowhere.txt')")
    with pytest.raises(ValueError, match="'compound' or 'mean', got 'sum'"):
        load_reward("r", f"lexicon(path={str(lexicon)!r}, normalize='sum')")


# ---- regex ----


def test_regex_searches_or_matches_the_full_text():
    texts = ["<a>\nx</a>", "say <a></a>", "a", chat("<a>1</a>")]
    assert function(r"regex(pattern='<a>.*</a>')")(completions=texts) == [1, 1, 0, 1]
    assert function(r"regex(pattern='<a>.*</a>', full=True)")(completions=texts) == [1, 0, 0, 1]
    with pytest.raises(ValueError, match="is not a regular expression"):
        load_reward("r", "regex(pattern='(')")


# ---- gsm8k ----


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 72", "72"),
        ("so 5 and 6\n#### 72.", "72"),
        ("#### 72.0", "72"),
        ("####72\nQuestion 3: 9", "72"),
        ("#### 1\n#### $1,234.50 dollars in 5 days", "1234.50"),
        ("####\n-5", "-5"),
        ("#### -$5", "-5"),
        ("#### $-5", "-5"),
        ("#### \\boxed{-1{,}000}", "-1000"),
        ("#### none, but 5 in the line", "5"),
        ("5 before\n#### none\n5 after", None),
        ("5 #### none", None),
        ("\\boxed{3} and \\boxed{x = \\$4} after 9", "4"),
        ("\\boxed{\\frac{3}{4}}", "0.75"),
        ("\\boxed{12\\text{ of }\\mathbf{8}}", "8"),
        ("\\boxed{7", "7"),
        ("A: 18", "18"),
        ("16-3 = 13", "13"),
        ("it is 16-3", "3"),
        ("a loss of −7", "-7"),
        ("one half is 1/2.", "0.5"),
        ("7/0", None),
        ("about .5", "0.5"),
        ("50%", "50"),
        ("1,000,000.", "1000000"),
        ("no number", None),
        ("", None),
    ],
)
def test_final_answer(text, answer):
    assert final_answer(text) == (None if answer is None else pytest.approx(type(final_answer("1"))(answer), abs=0))
    if "mathbf" not in text:  # that box has more than a number
        assert vote(text) == final_answer(text)


@pytest.mark.parametrize(
    ("text", "votes"),
    [
        ("It is 7, so \\boxed{ B }", "B"),
        ("\\boxed{A} or \\boxed{\\text{two  words}}", "\\text{twowords}"),
        ("\\boxed{}", None),
        ("\\boxed{x = 3}", type(final_answer("1"))("3")),
        ("\\boxed{-\\frac{1}{2}}", type(final_answer("1"))("-0.5")),
        ("\\boxed{\\$1{,}200\\text{ a month}} of 7", type(final_answer("1"))("1200")),
        ("\\boxed{25\\%}", type(final_answer("1"))("25")),
        ("\\boxed{7/0}", "7/0"),
        ("no number and no box", None),
        ("I took 2 steps", type(final_answer("1"))("2")),
    ],
)
def test_a_box_votes_for_a_number_or_for_its_text(text, votes):
    assert vote(text) == votes


def test_different_boxes_are_different_votes():
    contents = [
        "2",
        "x+1",
        "2x+1",
        "x^2",
        "\\sqrt2",
        "-\\sqrt2",
        "\\frac{\\sqrt3}{2}",
        "(1,2)",
        "1,2",
        "12",
        "1",
        "16-3",
        "3",
    ]
    assert len({vote(f"so \\boxed{{{content}}}") for content in contents}) == len(contents)
    same = ["1200", "1,200", "1200.0", " 1{,}200 ", "x = 1200", "$1200$", "1200\\text{ cm}", "3600/3"]
    assert {vote(f"so \\boxed{{{content}}}") for content in same} == {1200}


def test_gsm8k_compares_values():
    reward = function("gsm8k")
    golds = ["a\n#### 1,072", "#### 72", "72", "nothing", "#### -3"]
    assert reward(completions=["1072.0", "73", chat("#### 72"), "1", "is -3."], answer=golds) == [1, 0, 1, None, 1]
    assert function("gsm8k(column='gold')")(completions=["5"], gold=["5"], answer=["6"]) == [1]
    assert reward(completions=["9" * 100_000, "1/" + "9" * 100_000, "\\boxed{" * 10_000], answer=["9"] * 3) == [0, 0, 0]
    with pytest.raises(ValueError, match="needs a column 'answer'"):
        reward(completions=["1"])


def test_gsm8k_reads_numbers_of_any_type():
    golds = [5e-05, 1e16, 7, 0.5, -2.0, "3e2", np.float32(0.25), True, None]
    answers = ["0.00005", "10,000,000,000,000,000", "7.0", "1/2", "-2", "300", "0.25", "1", "1"]
    assert function("gsm8k")(completions=answers, answer=golds) == [1] * 7 + [None] * 2
    assert function("gsm8k")(completions=["5", "16"], answer=golds[:2]) == [0, 0]
    assert function("gsm8k")(completions=["it is 5e-5", "1E+16"], answer=golds[:2]) == [1, 1]


# ---- countdown ----


@pytest.mark.parametrize(
    ("text", "solved"),
    [
        ("<answer>3*5+7</answer>", 1),
        ("<think>3 * 7 = 21</think>\n<answer> ( 7 + 5*3 ) </answer> done", 1),
        ("<answer>1</answer> no: <answer>7 + 3 * 5 = 22</answer>", 1),  # the last one, by its left side
        ("<answer>7 - -5 * 3</answer>", 1),
        ("<answer>+3*5+7</answer>", 1),
        ("<answer>-(-3)*5+7</answer>", 1),
        ("<answer>3*5\n+7</answer>", 1),
        ("<answer>3*5+7</answer> and <answer>", 1),  # which is not the last pair
        ("<answer>0x3*5+7</answer>", 0),
        ("<answer>3*5+7 # so</answer>", 0),
        ("<answer>3and 5</answer>", 0),
        ("<answer>3*5+7//1</answer>", 0),
        ("<answer>3*5+7+0</answer>", 0),  # a number too many
        ("<answer>22</answer>", 0),
        ("<answer>3*5</answer>", 0),
        ("<answer>3+5+7</answer>", 0),  # another value
        ("<answer>3*5+7", 0),
        ("3*5+7", 0),
        ("", 0),
        ("<answer></answer>", 0),
        ("<answer>3*5+7; 1</answer>", 0),
        ("<answer>7/0+3*5</answer>", 0),
        ("<answer>7**3**5</answer>", 0),
        ("<answer>__import__('os').abort()</answer>", 0),
        ("<answer>" + "(" * 150 + "3*5+7" + ")" * 40 + "</answer>", 0),
        ("<answer>" + "9" * 1_000_000 + "</answer>", 0),
        ("<answer>3.0*5+7</answer>", 0),
        ("<answer>3*5+True*7</answer>", 0),
    ],
)
def test_countdown_takes_each_number_once(text, solved):
    assert function("countdown")(completions=[text, chat(text)], nums=[[3, 5, 7]] * 2, target=[22] * 2) == [solved] * 2


def test_countdown_abstains_on_rows_of_another_source():
    texts = ["<answer>3</answer>"] * 2
    assert function("countdown")(completions=texts, nums=[None, [3]], target=[None, 3]) == [None, 1]


def test_countdown_computes_exactly_and_counts_numbers_that_occur_twice():
    reward = function("countdown(nums='given', target='wanted')")
    texts = ["<answer>6/(1-3/4)</answer>", "<answer>8/(3-8/3)</answer>", "<answer>8/(3-8/3)</answer>"]
    given = [[1, 3, 4, 6], [8, 8, 3, 3], [8, 3, 3, 3]]
    assert reward(completions=texts, given=given, wanted=[24, 24, 24]) == [1, 1, 0]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"nums": [[1, 2]]}, "countdown() needs a column 'target' in the data"),
        ({"target": [3]}, "countdown() needs a column 'nums' in the data"),
        ({"nums": ["1 2"], "target": [3]}, "nums = '1 2', target = 3: expected whole numbers"),
        ({"nums": [[1, 2]], "target": ["3"]}, "nums = [1, 2], target = '3': expected whole numbers"),
        ({"nums": [[1, None]], "target": [3]}, "nums = [1, None], target = 3: expected whole numbers"),
        ({"nums": [None], "target": [3]}, "nums = None, target = 3: expected whole numbers"),
    ],
)
def test_countdown_names_data_that_it_cannot_use(columns, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        function("countdown")(completions=["<answer>1+2</answer>"], **columns)


def test_contents_in_parts_are_read_as_their_texts():
    parts = [{"type": "text", "text": "so"}, {"type": "image", "url": "x"}, {"type": "text", "text": "#### 7"}]
    completions = [[{"role": "assistant", "content": parts}], [{"role": "assistant", "content": None}]]
    assert function("gsm8k")(completions=completions, answer=["7", "7"]) == [1, 0]


def test_a_lexicon_path_may_start_with_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "words.txt").write_text("good\t2\n")
    assert function("lexicon(path='~/words.txt', normalize='mean')")(completions=["good"]) == [2]


def test_rotary_positions_do_not_bound_the_length(classifier):
    folder, _ = classifier()
    reward = load_reward("r", f"classifier(path={str(folder)!r})").function
    longer = load_reward("r", f"classifier(path={str(folder)!r}, max_length={2 * reward.encoder.max_length})").function
    text = "b " * (reward.encoder.max_length + 5)
    assert longer([""], [text]) != reward([""], [text])


def test_positions_after_the_padding_bound_the_length(tmp_path, classifier):
    """RoBERTa and relatives have max_position_embeddings - padding_idx - 1 of them."""
    folder, _ = classifier()
    config = RobertaConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=34, num_labels=1, pad_token_id=3, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "roberta")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "roberta")
    reward = load_reward("r", f"classifier(path={str(tmp_path / 'roberta')!r})").function
    assert reward.encoder.max_length == 34 - 3 - 1
    long = reward(["a "], ["b " * 99])
    assert long == reward([""], ["b " * (30 - 1)])  # and the end token
    with pytest.raises(ValueError, match="max_length = 31, but the model has only 30 learned positions"):
        load_reward("r", f"classifier(path={str(tmp_path / 'roberta')!r}, max_length=31)")
    with pytest.raises(ValueError, match="classifier cannot be built, RuntimeError"):
        load_reward("r", f"classifier(path={str(tmp_path / 'roberta')!r}, device='foo')")


def test_learned_positions_of_gpt2_bound_the_length(tmp_path, classifier):
    folder, _ = classifier()
    config = GPT2Config(
        vocab_size=len(WORDS), n_embd=16, n_layer=1, n_head=2, n_positions=40, num_labels=1, pad_token_id=3
    )
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "gpt2")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "gpt2")
    source = repr(str(tmp_path / "gpt2"))
    longest = load_reward("r", f"classifier(path={source}, max_length=40)").function
    assert longest([""], ["b " * 99]) == load_reward("r", f"classifier(path={source})").function([""], ["b " * 99])
    with pytest.raises(ValueError, match="max_length = 41, but the model has only 40 learned positions"):
        load_reward("r", f"classifier(path={source}, max_length=41)")


def test_gsm8k_agrees_with_the_labels_of_real_solutions(shared):
    with (
        open(shared / "data/gsm8k/test.jsonl") as tests,
        open(shared / "data/gsm8k/example_model_solutions.jsonl") as solutions,
    ):
        pairs = [(json.loads(test), json.loads(solution)) for test, solution in zip(tests, solutions, strict=True)]
    assert len(pairs) == 1319
    assert all(test["question"] == solution["question"] for test, solution in pairs)
    labelled = [(test["answer"], s) for test, solution in pairs for s in solution.values() if isinstance(s, dict)]
    values = function("gsm8k")(
        completions=[s["solution"] for _, s in labelled], answer=[answer for answer, _ in labelled]
    )
    assert len(values) == 4 * 1319
    assert values == [float(s["is_correct"]) for _, s in labelled]


# ---- classifier ----


WORDS = ["<unk>", "<s>", "</s>", "<pad>", *"abcdefghijklmnopqrstuvwxyz"]


@pytest.fixture
def classifier(tmp_path):
    """Function that creates a folder with a small random classifier and returns it with the model."""

    def make(family="llama", labels=1, pad=3, tokenizer_pad="<pad>", chat_template=None, begin=False, **config):
        torch.manual_seed(0)
        tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
        tokenizer.pre_tokenizer = Whitespace()
        if begin:
            tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": tokenizer_pad}
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=chat_template, **names)
        shape = {
            "vocab_size": len(WORDS),
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": 32,
            "num_labels": labels,
            "pad_token_id": pad,
            "initializer_range": 0.5,
            **config,
        }
        kinds = {
            "llama": (LlamaConfig, LlamaForSequenceClassification),
            "bert": (BertConfig, BertForSequenceClassification),
            "causal": (LlamaConfig, LlamaForCausalLM),
        }
        config_type, model_type = kinds[family]
        model = model_type(config_type(**shape)).eval()
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        model.save_pretrained(folder)
        fast.save_pretrained(folder)
        return folder, model

    return make


PROMPTS = ["a b", "c", "d e f g h", "i", "j k l"]
TEXTS = ["m n o p q r s t", "u", "v w", "x y z a b c", ""]


def alone(model, rows):
    """Expected logits (rows, labels): each row by itself, without padding."""
    model.config.pad_token_id = None
    with torch.no_grad():
        return torch.cat([model(torch.tensor([row])).logits for row in rows])


def rows_of(prompts, texts, end=(2,)):
    return [[WORDS.index(word) for word in f"{p} {t}".split()] + list(end) for p, t in zip(prompts, texts, strict=True)]


@pytest.mark.parametrize("batch_size", [1, 2, 64])
@pytest.mark.parametrize(("pad", "tokenizer_pad"), [(3, "<pad>"), (0, "<pad>"), (None, "<pad>"), (None, None)])
def test_scores_of_a_batch_equal_those_of_single_rows(classifier, pad, tokenizer_pad, batch_size):
    folder, model = classifier(pad=pad, tokenizer_pad=tokenizer_pad)
    reward = load_reward("r", f"{folder}(batch_size={batch_size})").function
    scores = reward(prompts=[p + " " for p in PROMPTS], completions=TEXTS)
    truth = alone(model, rows_of(PROMPTS, TEXTS))[:, 0]
    assert truth.std() > 0.1
    torch.testing.assert_close(torch.tensor(scores), truth, atol=1e-5, rtol=1e-5)


def test_a_classifier_that_pads_with_eos_scores_as_in_transformers(classifier):
    """Such a model scores the token before EOS, for any batch."""
    folder, model = classifier(pad=2, tokenizer_pad="</s>")
    truth = alone(model, rows_of(PROMPTS, TEXTS, end=()))[:, 0]
    for batch_size in (1, 64):
        scores = load_reward("r", f"{folder}(batch_size={batch_size})").function([p + " " for p in PROMPTS], TEXTS)
        torch.testing.assert_close(torch.tensor(scores), truth, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_several_outputs_need_a_label(classifier, family):
    id2label = {0: "bad", 1: "fair", 2: "good"}
    folder, model = classifier(family, labels=3, id2label=id2label, label2id={n: i for i, n in id2label.items()})
    with pytest.raises(ValueError, match="outputs bad, fair, good; choose one with label"):
        load_reward("r", str(folder))
    with pytest.raises(ValueError, match="got label=3"):
        load_reward("r", f"{folder}(label=3)")
    logits = alone(model, rows_of(PROMPTS, TEXTS))
    truth = {
        "label='good'": logits[:, 2],
        "label=0": logits[:, 0],
        "label='bad', probability=True": logits.softmax(1)[:, 0],
    }
    for arguments, expected in truth.items():
        scores = load_reward("r", f"{folder}({arguments})").function([p + " " for p in PROMPTS], TEXTS)
        torch.testing.assert_close(torch.tensor(scores), expected, atol=1e-5, rtol=1e-5)


def test_options_select_the_scored_text(classifier):
    folder, model = classifier()
    cases = {
        "append_eos=False": rows_of(PROMPTS, TEXTS, end=()),
        "max_length=3": [[*row[-3:-1], 2] for row in rows_of(PROMPTS, TEXTS)],
        "append_eos=False, max_length=3": [row[-3:] for row in rows_of(PROMPTS, TEXTS, end=())],
        "include_prompt=False": rows_of([""] * 5, TEXTS),
    }
    for arguments, rows in cases.items():
        scores = load_reward("r", f"{folder}({arguments})").function([p + " " for p in PROMPTS], TEXTS)
        torch.testing.assert_close(torch.tensor(scores), alone(model, rows)[:, 0], atol=1e-5, rtol=1e-5)
    sigmoid = load_reward("r", f"{folder}(probability=True)").function([p + " " for p in PROMPTS], TEXTS)
    truth = alone(model, rows_of(PROMPTS, TEXTS))[:, 0].sigmoid()
    torch.testing.assert_close(torch.tensor(sigmoid), truth, atol=1e-5, rtol=1e-5)


def test_texts_longer_than_the_model_lose_their_beginning(classifier):
    folder, model = classifier()
    long = " ".join("abcdefghij" * 10)
    score = load_reward("r", str(folder)).function([long], [" z"])
    expected = alone(model, [rows_of([long], ["z"])[0][-32:]])[0, 0].item()
    assert score == pytest.approx([expected], abs=1e-5)


def test_a_classifier_abstains_for_a_text_without_tokens(classifier):
    folder, _ = classifier()
    reward = load_reward("r", f"{folder}(append_eos=False)").function
    assert [value is None for value in reward(["", "a"], ["", ""])] == [True, False]
    assert reward([], []) == []


def test_conversations_use_the_chat_template(classifier):
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m.content }} {% if m.role == 'assistant' %}z {% endif %}{% endfor %}"
    )
    prompts, texts = [chat(p, "user") for p in PROMPTS], [chat(t) for t in TEXTS]
    folder, model = classifier(chat_template=template, begin=True)
    rows = [[1, *row] for row in rows_of(PROMPTS, [f"{t} z" for t in TEXTS], end=())]
    scores = load_reward("r", str(folder)).function(prompts, texts)
    torch.testing.assert_close(torch.tensor(scores), alone(model, rows)[:, 0], atol=1e-5, rtol=1e-5)

    folder, model = classifier(begin=True)  # without a template the contents are joined
    rows = [[1, *row] for row in rows_of(PROMPTS, TEXTS)]
    scores = load_reward("r", str(folder)).function(prompts, texts)
    torch.testing.assert_close(torch.tensor(scores), alone(model, rows)[:, 0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("template", [None, "{% for m in messages %}{{ m.role[0] }} {{ m.content }} {% endfor %}"])
def test_an_answer_that_continues_the_prompt_is_scored_as_one_message(classifier, template):
    folder, _ = classifier(chat_template=template)
    question, text = chat(PROMPTS[0], "user"), TEXTS[0]
    prompts = [[*question, *chat(f"{text} ")], question]
    encoder = load_reward("r", str(folder)).function.encoder
    assert encoder.ids(prompts[0], chat(text)) == encoder.ids(prompts[1], chat(f"{text} {text}"))


def test_a_classifier_whose_template_leaves_messages_out_is_refused(classifier):
    folder, _ = classifier(chat_template="{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}")
    with pytest.raises(ValueError, match="a conversation to score: the chat template leaves out message 1"):
        load_reward("r", str(folder)).function([chat(PROMPTS[0], "user")], [chat(TEXTS[0])])


def test_models_that_are_not_a_trained_classifier_are_refused(classifier, tmp_path):
    folder, _ = classifier("causal")
    with pytest.raises(ValueError, match=r"is not a trained classifier: its weights lack score.weight"):
        load_reward("r", str(folder))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="cannot read a classifier"):
        load_reward("r", str(folder))
    with pytest.raises(ValueError, match="is not a Hugging Face model folder"):
        load_reward("r", f"classifier(path={str(tmp_path / 'nowhere')!r})")


def test_tied_embeddings_under_the_name_of_the_head_are_refused(classifier):
    """transformers 5.23 would load such a model with random embeddings and only log it."""
    folder, _ = classifier(tie_word_embeddings=True)
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"] = state.pop("model.embed_tokens.weight")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lack model.embed_tokens.weight, .* random\n.*reward-model train"):
        load_reward("r", str(folder))


@pytest.mark.parametrize("options", ["batch_size=1", "append_eos=False, probability=True"])
@pytest.mark.parametrize("how", ["mean", "min"])
def test_an_ensemble_combines_its_members(classifier, how, options):
    (first, _), (second, other) = classifier(), classifier(pad=0)
    with torch.no_grad():
        other.score.weight.neg_()
    other.save_pretrained(second)
    prompts = [p + " " for p in PROMPTS]
    alone = [load_reward("r", f"{folder}({options})").function(prompts, TEXTS) for folder in (first, second)]
    scores = torch.tensor(alone)
    assert 0 < (scores[0] < scores[1]).sum() < 5  # each is the lower one somewhere
    truth = scores.mean(0) if how == "mean" else scores.amin(0)
    reward = load_reward("r", f"ensemble(paths=[{str(first)!r}, {str(second)!r}], how={how!r}, {options})").function
    torch.testing.assert_close(torch.tensor(reward(prompts, TEXTS)), truth, atol=1e-5, rtol=1e-5)
    assert reward([], []) == []


def test_an_ensemble_abstains_with_its_members(classifier):
    folder, _ = classifier()
    reward = load_reward("r", f"ensemble(paths=[{str(folder)!r}], append_eos=False)").function
    assert [value is None for value in reward(["", "a"], ["", ""])] == [True, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "ensemble needs paths"),
        ("paths=[]", r"paths must be a list of model folders, such as \['a', 'b'\], got \[\]"),
        ("paths='a'", "paths must be a list"),
        ("paths=['a'], how='max'", "how must be 'mean' or 'min', got 'max'"),
        ("paths=['a'], batchsize=3", "does not take 'batchsize'; it takes: paths, how, batch_size"),
        ("paths=['a'], path='b'", "does not take 'path'"),
        ("paths=['nowhere']", "is not a Hugging Face model folder"),
    ],
)
def test_ensemble_refuses_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        load_reward("r", f"ensemble({arguments})")


@pytest.mark.parametrize(
    "arguments", ["batch_size=0", "batch_size='8'", "dtype='int8'", "max_length=1", "max_length=2.5"]
)
def test_classifier_refuses_bad_arguments(classifier, arguments):
    folder, _ = classifier()
    with pytest.raises(ValueError, match=arguments.split("=")[0]):
        load_reward("r", f"{folder}({arguments})")


def test_a_trained_reward_model_separates_good_reviews_from_bad(shared):
    folder = shared / "models/sentiment-rm-656k"
    reviews = shared / "data/sentence_polarity/sentence_polarity"
    lines = {
        sign: (reviews / f"rt-polarity.{name}").read_text(encoding="latin-1").splitlines()[-150:]
        for sign, name in ((1, "pos"), (-1, "neg"))
    }
    texts = lines[1] + lines[-1]
    scores = load_reward("r", str(folder)).function([""] * len(texts), texts)
    right = [(score > 0) == (i < 150) for i, score in enumerate(scores)]
    assert sum(right) / len(right) > 0.68

    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [[*tokenizer(text).input_ids, tokenizer.eos_token_id] for text in texts[:20]]
    torch.testing.assert_close(torch.tensor(scores[:20]), alone(model, rows)[:, 0], atol=1e-4, rtol=1e-4)
    one_by_one = load_reward("r", f"{folder}(batch_size=1)").function([""] * 20, texts[:20])
    assert one_by_one == pytest.approx(scores[:20], abs=1e-4)
