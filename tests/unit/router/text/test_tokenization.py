"""A router's tokenization from a model's small files alone equals that of `transformers` from the same folder."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from cluster.errors import ConfigError, InvalidRequest, NoChatTemplate, NoTokenizer
from cluster.messages import LogitRules, Sampling
from router.requests import ChatMessage, ChatOptions, ToolCall
from router.text.chat_template import ChatTemplate
from router.text.tokenization import Tokenization
from tests.examples import num_examples
from tests.unit.router.text.small_tokenizers import FAMILIES, byte_level, sentencepiece

ROOT = Path(__file__).parents[4]
DEMO_MODEL = ROOT / "examples" / "demo_model"
CONFIG = {"vocab_size": 300, "max_position_embeddings": 128, "eos_token_id": 2}
NOW_US = 1_798_761_599_000_000  # 2026-12-31 23:59:59 UTC
CONVERSATION = [
    ChatMessage("system", "Be brief."),
    ChatMessage("user", 'sum\nof "two"?'),
    ChatMessage("assistant", "é"),
]


def model_folder(folder: Path, tokenizer: Tokenizer | None = None, **files: object) -> Path:
    """Return a folder with config.json and the given files by name: a dict as .json, text as .jinja."""
    (folder / "config.json").write_text(json.dumps(files.pop("config", CONFIG)))
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        if isinstance(content, str):
            (folder / f"{name}.jinja").write_text(content)
        else:
            (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def demo() -> Tokenization:
    return Tokenization.load(str(DEMO_MODEL))


@pytest.fixture(scope="module")
def reference() -> object:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(DEMO_MODEL)


def test_chat_prompts_equal_the_prompts_of_transformers(demo: Tokenization, reference: object) -> None:
    messages = [{"role": message.role, "content": message.content} for message in CONVERSATION]
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)  # type: ignore[attr-defined]
    assert demo.encode_chat(CONVERSATION, NOW_US) == tuple(expected)


def test_text_prompts_equal_the_prompts_of_transformers(demo: Tokenization, reference: object) -> None:
    for text in ["", "def f(x):\n    return x\n", "<|endoftext|>x", "naïve 日本 😀\r\n\t"]:
        assert demo.encode(text) == tuple(reference.encode(text))  # type: ignore[attr-defined]


@settings(max_examples=num_examples(suite=17, search=50))
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_decoding_the_tokens_of_any_text_gives_the_text(text: str) -> None:
    tokenization = Tokenization.load(str(DEMO_MODEL))
    assert tokenization.decode(tokenization.encode(text)) == text


def test_bos_comes_from_the_post_processor_for_text_and_from_the_template_for_chats(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"}
    tokenization = Tokenization.load(str(model_folder(tmp_path, sentencepiece(), tokenizer_config=config)))
    assert tokenization.encode("ab")[0] == 1
    assert tokenization.encode_chat([ChatMessage("user", "ab")], NOW_US).count(1) == 1


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    tokenization = Tokenization.load(str(model_folder(tmp_path, tokenizer)))
    assert len(tokenization.encode("abcdef")) == 6
    assert len(tokenization.encode("a")) == 1


def test_half_a_surrogate_pair_is_a_clear_error(demo: Tokenization) -> None:
    with pytest.raises(InvalidRequest, match="surrogate pair at character 2"):
        demo.encode("ab\ud800")


def test_a_template_in_its_own_file_takes_precedence(tmp_path: Path) -> None:
    config = {"chat_template": "old"}
    folder = model_folder(tmp_path, byte_level(), tokenizer_config=config, chat_template="hello")
    tokenization = Tokenization.load(str(folder))
    assert tokenization.decode(tokenization.encode_chat([ChatMessage("user", "x")], NOW_US)) == "hello"


def test_the_template_named_default_is_taken_from_a_list(tmp_path: Path) -> None:
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "hello"}]
    folder = model_folder(tmp_path, byte_level(), tokenizer_config={"chat_template": templates})
    tokenization = Tokenization.load(str(folder))
    assert tokenization.decode(tokenization.encode_chat([ChatMessage("user", "x")], NOW_US)) == "hello"


TEMPLATE_OF_EVERY_EXTRA = """
{%- set found = namespace(system=false) -%}
{%- for m in messages -%}
    {%- if loop.first and m.role == 'system' %}{% set found.system = true %}{% continue %}{% endif -%}
    {%- generation -%}{{ {'text': m.content} | tojson }}{%- endgeneration -%}
{%- endfor -%}
{{- strftime_now('%Y')[:2] }}{{ found.system }}{{ tools is none }}
{%- if add_generation_prompt %}<tool>{% endif %}"""


def test_templates_have_the_extensions_of_transformers(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, byte_level(), chat_template=TEMPLATE_OF_EVERY_EXTRA)
    tokenization = Tokenization.load(str(folder))
    text = tokenization.decode(tokenization.encode_chat(CONVERSATION[:2], NOW_US))
    assert text == '{"text": "sum\\nof \\"two\\"?"}20TrueTrue<tool>'


@pytest.mark.parametrize("zone", ["UTC", "Pacific/Auckland", "America/Los_Angeles"])
def test_a_templates_date_is_in_utc_in_every_time_zone_of_the_router(
    zone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = (
        "{% macro day() %}{{ strftime_now('%d %B %Y') }}{% endmacro %}{{ day() }} {{ strftime_now('%H:%M %s %%s%z') }}"
    )
    tokenization = Tokenization.load(str(model_folder(tmp_path, byte_level(), chat_template=template)))
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        texts = [
            tokenization.decode(tokenization.encode_chat(CONVERSATION, at_us)) for at_us in (NOW_US, NOW_US + 1_000_000)
        ]
    finally:
        monkeypatch.undo()
        time.tzset()
    assert texts == ["31 December 2026 23:59 1798761599 %s", "01 January 2027 00:00 1798761600 %s"]


def test_a_template_that_draws_at_random_is_refused_at_load(tmp_path: Path) -> None:
    """Such a template could not be rendered a second time when its request is resumed."""
    folder = model_folder(tmp_path, byte_level(), chat_template="{{ ['a', 'b'] | random }}")
    with pytest.raises(ConfigError, match="random"):
        Tokenization.load(str(folder))


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].content + 1 }}", "fails on these messages"),
        ("{{ 5 | xmlattr }}", "fails on these messages"),  # an AttributeError
    ],
)
def test_an_exception_of_a_template_reaches_the_client(tmp_path: Path, template: str, reason: str) -> None:
    tokenization = Tokenization.load(str(model_folder(tmp_path, byte_level(), chat_template=template)))
    with pytest.raises(InvalidRequest, match=reason):
        tokenization.encode_chat([ChatMessage("user", "x")], NOW_US)


def test_a_broken_template_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not valid Jinja"):
        Tokenization.load(str(model_folder(tmp_path, byte_level(), chat_template="{% for %}")))


def test_without_a_template_chats_are_a_named_error(tmp_path: Path) -> None:
    tokenization = Tokenization.load(str(model_folder(tmp_path, byte_level())))
    assert not tokenization.model_info.has_chat_template
    with pytest.raises(NoChatTemplate, match="no chat template"):
        tokenization.encode_chat([ChatMessage("user", "x")], NOW_US)


def test_without_a_tokenizer_token_ids_are_served_and_text_is_a_named_error(tmp_path: Path) -> None:
    tokenization = Tokenization.load(str(model_folder(tmp_path)))
    assert not tokenization.model_info.has_tokenizer
    assert tokenization.text_stream((), 0).push([1, 2]).text == ""
    for refused in (
        lambda: tokenization.encode("x"),
        lambda: tokenization.encode_chat([ChatMessage("user", "x")], NOW_US),
        lambda: tokenization.decode([1]),
        lambda: tokenization.text_stream(("x",), 0),
    ):
        with pytest.raises(NoTokenizer, match="token ids"):
            refused()


def test_a_tokenizer_in_another_format_is_named_in_the_notes(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    (folder / "tokenizer.model").write_bytes(b"")
    assert "tokenizer.model is not read" in Tokenization.load(str(folder)).model_info.notes[0]


def test_limits_come_from_the_configuration(tmp_path: Path) -> None:
    info = Tokenization.load(str(model_folder(tmp_path, config={"n_positions": 64, "vocab_size": 9}))).model_info
    assert (info.max_model_len, info.vocab_size, info.eos_token_ids) == (64, 9, frozenset[int]())
    nested = {"text_config": {"max_position_embeddings": 32, "vocab_size": 5, "eos_token_id": [3, 4]}, "vocab_size": 9}
    info = Tokenization.load(str(model_folder(tmp_path, config=nested)), served_model_name="mine").model_info
    assert (info.max_model_len, info.vocab_size, info.eos_token_ids) == (32, 5, frozenset({3, 4}))
    assert info.name == "mine"
    assert Tokenization.load(str(tmp_path), max_model_len=16).model_info.max_model_len == 16


def test_generation_config_gives_default_sampling_and_more_end_tokens(tmp_path: Path) -> None:
    generation = {
        "eos_token_id": [7, 8],
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "do_sample": True,
        "repetition_penalty": 1.05,
        "bad_words_ids": [[7], [4, 5]],
        "suppress_tokens": [6, 8],
        "no_repeat_ngram_size": 3,
        "max_new_tokens": 99,
    }
    info = Tokenization.load(str(model_folder(tmp_path, generation_config=generation))).model_info
    assert info.eos_token_ids == frozenset({2, 7, 8})
    rules = LogitRules(repetition_penalty=1.05, bad_words=((4, 5), (6,)))  # as in transformers, no end token
    assert info.default_sampling == Sampling(temperature=0.6, top_k=20, top_p=0.9, rules=rules)
    assert info.default_max_tokens == 99
    assert info.notes == ("generation_config.json: no_repeat_ngram_size=3 is not applied",)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"config": {"vocab_size": 9}}, "max-model-len"),
        ({"config": {"n_positions": 9}}, "no vocab_size"),
        ({"config": []}, "must hold a JSON object"),
        ({"generation_config": {"temperature": "hot"}}, "temperature must not be 'hot'"),
    ],
)
def test_a_folder_that_cannot_be_served_is_refused_by_reason(
    tmp_path: Path, files: dict[str, object], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        Tokenization.load(str(model_folder(tmp_path, **files)))  # type: ignore[arg-type]


def test_a_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    (model_folder(tmp_path) / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(ConfigError, match="cannot read"):
        Tokenization.load(str(tmp_path))


@pytest.mark.parametrize("model", ["/no/such/folder", "./nowhere", "nobody/nothing", "no such name!"])
def test_a_missing_model_is_refused_by_name(model: str) -> None:
    with pytest.raises(ConfigError, match=model):
        Tokenization.load(model)


def test_tokens_listed_only_in_the_tokenizer_configuration_are_known(tmp_path: Path) -> None:
    tokenizer = byte_level()
    new_id = tokenizer.get_vocab_size()
    token = {
        "content": "<|late|>",
        "special": True,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "single_word": False,
    }
    folder = model_folder(tmp_path, tokenizer, tokenizer_config={"added_tokens_decoder": {str(new_id): token}})
    assert Tokenization.load(str(folder)).encode("a<|late|>b") == (ord("a"), new_id, ord("b"))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_loads_and_decodes(tmp_path: Path, name: str) -> None:
    tokenizer = FAMILIES[name]()
    tokenization = Tokenization.load(str(model_folder(tmp_path, tokenizer)))
    assert tokenization.decode([3, 4]) == tokenizer.decode([3, 4])
    with pytest.raises(InvalidRequest, match="from 0 to 299"):
        tokenization.decode([300])


def test_tokenizing_needs_neither_torch_nor_transformers() -> None:
    program = (
        "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None;"
        "from router.text.tokenization import Tokenization;"
        f"print(Tokenization.load({str(DEMO_MODEL)!r}).encode('def'))"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60, capture_output=True)


_SHOWS_ALL = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "{% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %}</>{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{{ documents }}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_template_is_given_calls_results_tools_and_documents() -> None:
    messages = [
        ChatMessage("user", "hi"),
        ChatMessage("assistant", "", tool_calls=(ToolCall("1", "f", '{"a": [1]}'), ToolCall("2", "g", "not JSON"))),
        ChatMessage("tool", "3", tool_call_id="1"),
    ]
    options = ChatOptions(tools=({"name": "f"},), documents=({"text": "d"},), add_generation_prompt=False)
    text = ChatTemplate(_SHOWS_ALL, {}).render(messages, 0, options)
    assert text == (
        '<user>hi</><assistant>[f {"a": [1]}][g "not JSON"]</><tool>3#1</>[{"name": "f"}]' + "[{'text': 'd'}]"
    )


@pytest.mark.parametrize("takes_them_anywhere", [True, False])
def test_later_system_messages_stand_at_the_beginning_where_the_template_takes_them_nowhere_else(
    takes_them_anywhere: bool,
) -> None:
    check = "" if takes_them_anywhere else "{{ raise_exception('not first') if m.role == 'system' and not loop.first }}"
    template = ChatTemplate("{% for m in messages %}" + check + "<{{ m.role }}>{{ m.content }}{% endfor %}", {})
    messages = [
        ChatMessage("user", "hi"),
        ChatMessage("system", "a"),
        ChatMessage("user", "?"),
        ChatMessage("system", "b"),
    ]
    in_order = "<user>hi<system>a<user>?<system>b"
    assert template.render(messages, 0) == (in_order if takes_them_anywhere else "<system>a\nb<user>hi<user>?")
    if not takes_them_anywhere:
        with pytest.raises(InvalidRequest, match="not first"):
            template.render(messages, 0, ChatOptions(continue_final_message=True))


@pytest.mark.parametrize("content", ["It is ", "hi", "", "two\nlines "])
def test_the_prompt_may_end_within_the_last_message(content: str) -> None:
    messages = [ChatMessage("user", "hi"), ChatMessage("assistant", content)]
    text = ChatTemplate(_SHOWS_ALL, {}).render(messages, 0, ChatOptions(continue_final_message=True))
    assert text == "<user>hi</><assistant>" + content.lstrip()


def test_a_template_that_leaves_the_last_message_out_cannot_continue_it() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    messages = [ChatMessage("user", "hi"), ChatMessage("assistant", "It is")]
    with pytest.raises(InvalidRequest, match="continue_final_message"):
        template.render(messages, 0, ChatOptions(continue_final_message=True))


def test_markers_are_text_although_they_are_special_tokens() -> None:
    plain = Tokenization.load(str(DEMO_MODEL))
    marked = Tokenization.load(str(DEMO_MODEL), markers=("<|endoftext|>",))
    token_ids = (*plain.encode("a"), 0, *plain.encode("b"))
    texts = [tokenization.text_stream((), 0).push(token_ids).text for tokenization in (plain, marked)]
    assert texts == ["ab", "a<|endoftext|>b"]
    assert plain.model_info.tokenizer_digest != marked.model_info.tokenizer_digest
