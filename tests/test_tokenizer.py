"""Tokenizer, chat template and detokenizer, against transformers and against whole decoding."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from minilora.config import CheckpointError, RequestError
from minilora.engine import tokenizer as tokenizer_module
from minilora.engine.detokenizer import Detokenizer
from minilora.engine.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "SELECT name, count(*) FROM users WHERE age >= 21 GROUP BY name;",
    "Ahoy! The sea is wide; the captain's parrot knows 1234 words.",
    "caf\u00e9 na\u00efve \u65e5\u672c\u8a9e \U0001f600\U0001f600 \U0001f468\u200d\U0001f467",
] * 3
TEXTS = [
    "", " ", "Hello world", " leading space", "two  spaces and  three   of them", "trailing ",
    "tabs\tand\nlines\r\n\n", "caf\u00e9, \u65e5\u672c\u8a9e \U0001f600\U0001f9d1\u200d\U0001f680!",
    "it's they'd; 1234567 + 89.5", "<0x41> <0xE2>", "\u2581 marks", "\x00\x7f\ufffd",
]  # fmt: skip
INSIDE = ["stop</s>here", "<s>a", "a</s>", "<unk>"]
SPECIAL = ("<unk>", "<s>", "</s>")


def byte_level() -> tokenizers.Tokenizer:
    """As of Llama 3: byte-level BPE, a token of the beginning added by the post-processor."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=list(SPECIAL), show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<tool\u00e9\U0001f600>", normalized=False)])
    backend.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), bos_first(backend)]
    )
    return backend


def llama_2() -> tokenizers.Tokenizer:
    """As of Llama 2: BPE over text whose spaces are marks, with tokens for single bytes."""
    backend = byte_fallback()
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    return backend


def metaspace() -> tokenizers.Tokenizer:
    """As transformers writes it now: a pre-tokenizer makes the marks, at the beginning only."""
    backend = byte_fallback()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return backend


def byte_fallback() -> tokenizers.Tokenizer:
    learner = tokenizers.Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    learner.train_from_iterator(
        CORPUS[:3], trainers.BpeTrainer(vocab_size=180, show_progress=False)
    )
    learnt = json.loads(learner.to_str())["model"]
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *learnt["vocab"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(pair) for pair in learnt["merges"]]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )  # fmt: skip
    backend.add_special_tokens(list(SPECIAL))
    backend.post_processor = bos_first(backend)
    return backend


def bos_first(backend: tokenizers.Tokenizer) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )


MAKERS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte_level": byte_level, "llama_2": llama_2, "metaspace": metaspace,
}  # fmt: skip
MADE = {name: Tokenizer(make()) for name, make in MAKERS.items()}
ADDED_TOKEN = {"__type": "AddedToken", "content": "</s>", "lstrip": False, "normalized": False}
NAMED = {
    "bos_token": "<s>",
    "eos_token": ADDED_TOKEN,
    "unk_token": "<unk>",
}


def write(folder: Path, backend: tokenizers.Tokenizer, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    content = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMED, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return folder


def both(folder: Path) -> tuple[Tokenizer, Any]:
    ours = Tokenizer.from_folder(folder)
    assert ours is not None
    return ours, transformers.AutoTokenizer.from_pretrained(folder)


# ---- against transformers


@pytest.mark.parametrize("name", MAKERS)
def test_tokens_and_texts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    ours, theirs = both(write(tmp_path / "t", MAKERS[name]()))
    for text in (*TEXTS, *INSIDE, *CORPUS[:4]):
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special), text
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
            assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    assert ours.encode("a")[0] == ours.encode("")[0] == theirs.bos_token_id
    assert ours.vocab_size == len(theirs)


def test_a_llama_tokenizer_differs_from_transformers_only_where_it_says(tmp_path: Path) -> None:
    """transformers 5 builds that class anew from the vocabulary, with rules of its own."""
    ours, theirs = both(write(tmp_path / "t", llama_2(), tokenizer_class="LlamaTokenizer"))
    assert type(theirs).__name__ == "LlamaTokenizer"
    for text in TEXTS:
        ids = ours.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        if not text.startswith((" ", "\u2581")):
            assert ids == theirs.encode(text), text


@pytest.mark.parametrize("add", [True, False])
def test_the_post_processor_decides_and_not_add_bos_token(tmp_path: Path, add: bool) -> None:
    ours, theirs = both(
        write(tmp_path / "with", byte_level(), add_bos_token=add, add_eos_token=add)
    )
    assert ours.encode("Hello") == theirs.encode("Hello")
    backend = byte_level()
    backend.post_processor = processors.ByteLevel()
    ours, theirs = both(write(tmp_path / "without", backend, add_bos_token=add))
    assert ours.encode("Hello") == theirs.encode("Hello") == ours.encode("Hello", False)


def test_saved_truncation_and_padding_are_dropped(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=100)
    ours, theirs = both(write(tmp_path / "t", backend))
    long = CORPUS[0] * 10
    assert ours.encode(long) == theirs.encode(long)
    assert len(ours.encode(long)) > 100
    assert len(ours.encode("a")) == 2


@pytest.mark.parametrize("where", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_named_token_is_special_even_if_tokenizer_json_does_not_say_so(
    tmp_path: Path, where: str
) -> None:
    backend = tokenizers.Tokenizer.from_str(
        byte_level().to_str().replace('"content":"</s>"', '"content":"<gone>"')
    )
    backend.add_tokens([AddedToken("</s>", special=False)])
    folder = write(tmp_path / "t", backend)
    if where == "special_tokens_map.json":
        content = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / where).write_text(json.dumps({"eos_token": content.pop("eos_token")}))
        (folder / "tokenizer_config.json").write_text(json.dumps(content))
    ours, theirs = both(folder)
    ids = ours.encode("a</s>b")
    assert ids == theirs.encode("a</s>b")
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "ab"
    assert ours.is_silent(theirs.eos_token_id)


def test_one_tokens_text_keeps_its_space_and_silent_tokens_are_known() -> None:
    for ours in MADE.values():
        fox = ours.encode("a fox", add_special_tokens=False)
        assert "".join(ours.token_text(token) for token in fox).lstrip() == "a fox"
        assert ours.token_text(1) == "<s>"
        assert ours.token_text(10**6) == ours.decode([10**6]) == ""
        assert ours.is_silent(10**6)
        assert [ours.is_silent(token) for token in (1, 2, fox[0])] == [True, True, False]
    assert MADE["llama_2"].is_byte(3)
    assert not MADE["byte_level"].is_byte(3)


# ---- bad input


def test_a_folder_without_tokenizer_has_none(tmp_path: Path) -> None:
    assert Tokenizer.from_folder(tmp_path) is None


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff\xfe", b'{"model": {"type": "BPE"}}', b"[" * 100_000]
)
def test_a_damaged_tokenizer_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"^[^\n]*tokenizer\.json is no valid tokenizer"):
        Tokenizer.from_folder(tmp_path)


def test_a_post_processor_that_names_a_missing_token_is_found_at_once(tmp_path: Path) -> None:
    content = json.loads(llama_2().to_str())
    content["post_processor"]["special_tokens"] = {}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="no valid tokenizer"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("limit", "name"),
    [
        ("MAX_TOKENIZER_BYTES", "tokenizer.json"),
        ("MAX_TOKENIZER_CONFIG_BYTES", "tokenizer_config.json"),
        ("MAX_TEMPLATE_BYTES", "chat_template.jinja"),
    ],
)
def test_sizes_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, name: str
) -> None:
    folder = write(tmp_path / "t", byte_level(), chat_template="x" * 200)
    (folder / "chat_template.jinja").write_text("x" * 100)
    size = (folder / name).stat().st_size
    monkeypatch.setattr(tokenizer_module, limit, size)
    assert Tokenizer.from_folder(folder)
    monkeypatch.setattr(tokenizer_module, limit, size - 1)
    with pytest.raises(CheckpointError, match=f"{name} has more than {size - 1} bytes"):
        Tokenizer.from_folder(folder)


def test_a_template_inside_the_config_is_bounded_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "t", byte_level(), chat_template="x" * 200)
    monkeypatch.setattr(tokenizer_module, "MAX_TEMPLATE_BYTES", 199)
    with pytest.raises(CheckpointError, match="chat_template must be a text of at most 199"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", b"{", "no valid JSON"),
        ("tokenizer_config.json", b"[]", "must hold a JSON object"),
        ("tokenizer_config.json", b'{"chat_template": 3}', "chat_template must be a text"),
        ("chat_template.jinja", b"\xff", "no UTF-8 text"),
    ],
)
def test_a_damaged_file_beside_it_is_named(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    folder = write(tmp_path / "t", byte_level())
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        Tokenizer.from_folder(folder)
    assert name in str(caught.value)


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(RequestError, match=r"'\\ud83d' at position 2"):
        MADE["byte_level"].encode("ab\ud83d")


# ---- chat templates

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": 'Say "<b>caf\u00e9</b>" & \u65e5\u672c'},
    {"role": "assistant", "content": "caf\u00e9"},
    {"role": "user", "content": "Again"},
]
TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + "
        "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "lines": (
        "{{ bos_token }}\n{% for m in messages %}\n    {% if m.role == 'user' %}\n"
        "  U: {{ m.content | trim }}\n    {% elif 'tool_calls' in m %}\n  calls\n    {% else %}\n"
        "  {{ m.role | upper }}: {{ m.content }}{{ eos_token }}\n    {% endif %}\n{% endfor %}\n"
    ),
    "json": "{{ messages | tojson }}{{ messages[1] | tojson(indent=2) }}{{ undefined_name }}",
    "names": (
        "{{ strftime_now('%Y') }}{% if tools is none and documents is none %}none{% endif %}"
        "{{ pad_token is defined }}{{ unk_token }}{{ messages | length }}"
    ),
    "loop": (
        "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}"
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_chat_prompts_are_those_of_transformers(tmp_path: Path, name: str, prompt: bool) -> None:
    ours, theirs = both(write(tmp_path / "t", byte_level(), chat_template=TEMPLATES[name]))
    text = ours.apply_chat_template(TALK, add_generation_prompt=prompt)
    assert text == theirs.apply_chat_template(TALK, tokenize=False, add_generation_prompt=prompt)
    ids = theirs.apply_chat_template(TALK, add_generation_prompt=prompt, return_dict=False)
    assert ours.encode(text, add_special_tokens=False) == ids


def test_fields_that_are_none_are_dropped(tmp_path: Path) -> None:
    """As in transformers 5.24; in 5.17 a template wrote "None"."""
    folder = write(tmp_path / "t", byte_level(), chat_template=TEMPLATES["json"])
    ours = Tokenizer.from_folder(folder)
    assert ours is not None
    with_none = [{**message, "tool_calls": None} for message in TALK]
    assert ours.apply_chat_template(with_none) == ours.apply_chat_template(TALK)


def test_where_the_template_comes_from(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "plain"}]
    folder = write(tmp_path / "t", byte_level(), chat_template=named)
    ours, theirs = both(folder)
    assert ours.apply_chat_template(TALK) == "plain"
    assert theirs.apply_chat_template(TALK, tokenize=False) == "plain"
    (folder / "chat_template.jinja").write_text("file")
    ours, theirs = both(folder)
    assert ours.apply_chat_template(TALK) == "file"
    assert theirs.apply_chat_template(TALK, tokenize=False) == "file"


def render(template: str | None, messages: Any = TALK) -> str:
    return Tokenizer(byte_level(), {}, template).apply_chat_template(messages)


def test_what_a_chat_can_be_refused_for() -> None:
    with pytest.raises(RequestError, match=r"no chat template .*generate\(\)"):
        render(None)
    with pytest.raises(RequestError, match=r"template failed: roles must alternate$"):
        render("{{ raise_exception('roles\nmust alternate') }}")
    with pytest.raises(RequestError, match="template failed: Expected an expression"):
        render("{% for %}")
    with pytest.raises(RequestError, match="template failed: "):
        render("{{ messages[0].content + 3 }}")
    for messages in ([], ["Hi"], [[]]):
        with pytest.raises(RequestError, match="must be a list like"):
            render("x", messages)
    with pytest.raises(RequestError, match="JSON values"):
        render("x", [{"role": "user", "content": object()}])


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        ({"content": "Hi"}, "has role=None"),
        ({"role": 3, "content": "Hi"}, "has role=3"),
        ({"role": "user"}, "has content=None"),
        ({"role": "user", "content": 7}, "has content=7"),
        ({"role": "user", "content": [{"type": "image", "url": "x"}]}, "content=.*image"),
        ({"role": "user", "content": ["Hi"]}, "content=.*Hi"),
    ],
)
def test_a_message_is_refused_by_its_number(message: dict[str, Any], fault: str) -> None:
    with pytest.raises(RequestError, match=r"messages\[1\] .*" + fault + ".*; give "):
        render("x", [TALK[0], message])


def test_parts_of_a_text_are_joined_and_a_call_of_a_tool_needs_none() -> None:
    parts = [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "One\ntwo"
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "look"}]}
    assert render("{{ messages[0].tool_calls[0].name }}", [call]) == "look"


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ messages.append(1) }}",
        "{{ strftime_now.__code__.co_code }}",
        "{{ messages[0].update(role='x') }}",
        "{{ ('{0.__class__}' | attr('format'))(1).__len__() }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_a_template_stays_in_its_sandbox(attack: str) -> None:
    with pytest.raises(RequestError, match="template failed"):
        render(attack + "!")


# ---- detokenizer


def stream(ours: Tokenizer, ids: Sequence[int], stops: Sequence[str] = ()) -> tuple[list[str], Any]:
    """Push all ids; return the pieces, the last of `flush`."""
    detokenizer = Detokenizer(ours, stops)
    pieces = []
    for token in ids:
        pieces.append(detokenizer.push(token))
        assert detokenizer.text == "".join(pieces)
    pieces.append(detokenizer.flush())
    assert detokenizer.text == "".join(pieces)
    assert detokenizer.flush() == ""
    return pieces, detokenizer


def tokens_of(name: str) -> st.SearchStrategy[list[int]]:
    """Token ids: any, ids of the vocabulary's edge, runs of bytes, or of a text with emoji."""
    ours = MADE[name]
    letters = st.sampled_from("ab \u00e9\u65e5\U0001f600\U000e0041\u200d\ufffd\u2581\n")
    texts = st.text(letters, max_size=12).map(lambda text: ours.encode(text, False))
    single = st.integers(0, ours.vocab_size + 5).map(lambda token: [token])
    marks = [ours.encode(text, False) for text in ("\u2581", "  ", "\ufffd")]
    parts = st.one_of(single, texts, st.sampled_from(marks))
    if name != "byte_level":
        parts = parts | st.lists(st.integers(3, 258), max_size=6)
        euro = [3 + byte for byte in "\u20ac".encode()]
        parts = parts | st.sampled_from([euro, euro[:2], [3 + 0x20]])
    return st.lists(parts, max_size=25).map(lambda lists: [i for part in lists for i in part])


@pytest.mark.parametrize("name", MADE)
def test_pieces_add_up_to_the_decoded_text(name: str) -> None:
    ours = MADE[name]

    @settings(max_examples=400, deadline=None)
    @given(ids=tokens_of(name))
    def check(ids: list[int]) -> None:
        pieces, _ = stream(ours, ids)
        assert "".join(pieces) == ours.decode(ids)

    check()


def first_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Read the text letter by letter; cut it before the first stop string that is complete."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize("name", MADE)
def test_text_ends_before_the_first_stop_string(name: str) -> None:
    ours = MADE[name]
    letters = st.text("ab \u00e9\U0001f600\n", min_size=1, max_size=4)

    @settings(max_examples=400, deadline=None)
    @given(ids=tokens_of(name), extra=st.lists(letters, max_size=3), data=st.data())
    def check(ids: list[int], extra: list[str], data: st.DataObject) -> None:
        whole = ours.decode(ids)
        stops = list(extra)
        if whole:
            start = data.draw(st.integers(0, len(whole) - 1))
            stops.append(whole[start : start + data.draw(st.integers(1, 5))])
        text, stop = first_stop(whole, stops)
        pieces, detokenizer = stream(ours, ids, stops)
        assert ("".join(pieces), detokenizer.stop_string) == (text, stop)

    check()


def test_half_a_character_is_held_back() -> None:
    ours = MADE["byte_level"]
    single = [ours.encode(text, False) for text in ("a", "\U0001f9d1", "b")]
    (a,), astronaut, (b,) = single
    assert len(astronaut) == 3  # its first two bytes are one token
    assert stream(ours, [a, *astronaut, b])[0] == ["a", "", "", "\U0001f9d1", "b", ""]
    assert stream(ours, [a, *astronaut[:2]])[0] == ["a", "", "", "\ufffd"]
    assert stream(ours, [astronaut[0], b])[0] == ["", "\ufffdb", ""]
    assert stream(ours, [])[0] == [""]


def test_a_character_of_four_tokens_at_every_place_of_the_window() -> None:
    ours = MADE["byte_level"]
    tag = ours.encode("\U000e0041", False)
    assert len(tag) == 4
    for before in range(20):
        ids = [*ours.encode("ab" * before, False), *tag, *tag[:3]]
        assert "".join(stream(ours, ids)[0]) == ours.decode(ids)


def test_byte_tokens_come_with_the_first_other_token() -> None:
    ours = MADE["llama_2"]
    euro = [3 + byte for byte in "\u20ac".encode()]
    x = ours.encode("x", False)[-1]
    assert stream(ours, [x, *euro, x])[0] == ["x", "", "", "", "\u20acx", ""]
    assert stream(ours, [x, *euro, euro[1]])[0] == ["x", "", "", "", "", "\ufffd" * 4]


def test_special_tokens_neither_show_nor_cost_a_space() -> None:
    for name in ("llama_2", "metaspace"):
        ours = MADE[name]
        fox = ours.encode("the fox", False)
        ids = [1, *fox, 2, 2, 2, 2, 2, 2, 2, 2, 2, *fox]
        assert "".join(stream(ours, ids)[0]) == ours.decode(ids) == "the fox the fox"


def test_a_stop_string_across_tokens() -> None:
    ours = MADE["byte_level"]
    ids = [ours.encode(text, False) for text in ("one", "\n", "\n", "U", "ser", ":", "two")]
    flat = [token for part in ids for token in part]
    pieces, detokenizer = stream(ours, flat, ["\n\nUser:", "never"])
    assert "".join(pieces) == "one"
    assert detokenizer.stop_string == "\n\nUser:"
    almost = [token for part in ids[:5] for token in part]
    pieces, detokenizer = stream(ours, almost, ["\n\nUser:"])
    assert pieces[-1] == "\n\nUser"  # held back until the end
    assert detokenizer.stop_string is None


def test_of_several_stop_strings_the_first_complete_one_counts() -> None:
    ours = MADE["byte_level"]
    ids = ours.encode("abcd", False)
    for stops, text, stop in (
        (["bcd", "c"], "ab", "c"),
        (["c", "bc"], "a", "bc"),
        (["d", "abcd"], "", "abcd"),
        (["x"], "abcd", None),
    ):
        pieces, detokenizer = stream(ours, ids, stops)
        assert ("".join(pieces), detokenizer.stop_string) == (text, stop)


def test_a_stop_string_in_the_last_held_text_is_found_by_flush() -> None:
    ours = MADE["llama_2"]
    euro = [3 + byte for byte in "\u20ac".encode()]
    pieces, detokenizer = stream(ours, [*ours.encode("ab", False), *euro], ["b\u20ac"])
    assert "".join(pieces) == "a"
    assert detokenizer.stop_string == "b\u20ac"


class Counting(Tokenizer):
    """Counts the tokens that were decoded."""

    decoded = 0

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.decoded += len(token_ids)
        return super().decode(token_ids, skip_special_tokens)


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("kind", ["text", "garbage", "spaces", "special"])
def test_work_per_token_is_bounded(name: str, kind: str) -> None:
    ours = Counting(MAKERS[name]())
    continuation = 3 + 0x80 if name != "byte_level" else ours.encode("\u0100", False)[-1]
    parts = {
        "text": ours.encode("the captain's parrot \U0001f600", False),
        "garbage": [continuation],
        "spaces": ours.encode("\u2581", False)[-1:],
        "special": [2, 10**6],
    }
    ids = (parts[kind] * 3000)[:3000]
    ours.decoded = 0
    detokenizer = Detokenizer(ours, ["never", "parrot!"])
    start = time.perf_counter()
    for token in ids:
        detokenizer.push(token)
    detokenizer.flush()
    assert ours.decoded <= 12 * len(ids)
    assert time.perf_counter() - start < 2
    assert detokenizer.text == ours.decode(ids)


@pytest.mark.parametrize("name", MADE)
def test_an_answer_keeps_the_space_between_it_and_its_prompt(name: str) -> None:
    """As in vLLM: "The capital of" goes on with " France", whatever the kind of tokenizer."""
    ours = MADE[name]
    ids = ours.encode("say hello hello again", add_special_tokens=False)
    for cut in range(1, len(ids)):
        prompt, answer = ids[:cut], ids[cut:]
        detokenizer = Detokenizer(ours, prompt_token_ids=prompt)
        pieces = [detokenizer.push(token) for token in answer] + [detokenizer.flush()]
        assert ours.decode(prompt) + "".join(pieces) == ours.decode(ids)
