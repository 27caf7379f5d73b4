"""A real tokenizer for a test checkpoint: byte-level BPE with MiniMax's special tokens.

Every id below the vocabulary size is a token, so whatever a random model samples can be decoded:
first the 256 bytes and the merges, then fillers if the text gave too few merges, then the special
tokens. `]~!b[` opens a conversation, `]~b]` a turn, `[e~[` ends one.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from rocm_msa.checkpoint.corpus import TEXT

BOS = "]~b]"
EOS = "[e~["
PAD = "]!d~["
NAMESPACE = "]<]minimax[>["
IMAGE = "]<]image[>["
VIDEO = "]<]video[>["
UNK = "]!p~["

# Special: left out of decoded text. The others stay in it, for the reasoning and tool parsers.
SPECIAL_TOKENS = (
    UNK,
    BOS,
    EOS,
    PAD,
    "]~!b[",
    IMAGE,
    VIDEO,
    "]<]start of image[>[",
    "]<]end of image[>[",
    "]<]start of video[>[",
    "]<]end of video[>[",
    "]<]vision pad[>[",
)
MARKUP_TOKENS = (
    NAMESPACE,
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<mm:think>",
    "</mm:think>",
)

SMALLEST_VOCAB = 256 + len(SPECIAL_TOKENS) + len(MARKUP_TOKENS)

CHAT_TEMPLATE = r"""
{%- set ns = ']<]minimax[>[' -%}
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content is not none and content is defined -%}
{%- for part in content -%}
{%- if part is string -%}{{ part }}
{%- elif part.type == 'image' or part.type == 'image_url' -%}{{ ']<]image[>[' }}
{%- elif part.type == 'video' or part.type == 'video_url' -%}{{ ']<]video[>[' }}
{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- macro element(name, value) -%}
{{ ns }}<{{ name }}>
{%- if value is mapping -%}{%- for key, item in value.items() -%}{{ element(key, item) }}
{%- endfor -%}
{%- elif value is sequence and value is not string -%}
{%- for item in value -%}{{ element('item', item) }}{%- endfor -%}
{%- elif value is string -%}{{ value }}
{%- else -%}{{ value | tojson }}{%- endif -%}
{{ ns }}</{{ name }}>
{%- endmacro -%}
{%- if messages and messages[0].role in ['system', 'developer'] -%}
{%- set system = text(messages[0].content) -%}{%- set rest = messages[1:] -%}
{%- else -%}
{%- set system = 'You are a helpful assistant.' -%}{%- set rest = messages -%}
{%- endif -%}
{{ ']~!b[]~b]system\n' ~ system }}
{%- if tools -%}
{{ '\n\n# Tools\n<tools>\n' }}
{%- for tool in tools -%}{{ '<tool>' ~ ((tool.function or tool) | tojson) ~ '</tool>\n' }}
{%- endfor -%}
{{ '</tools>\nEvery tag of a call begins with ' ~ ns ~ ':\n' ~ ns ~ '<tool_call>\n' }}
{{- ns ~ '<invoke name="NAME">' ~ ns ~ '<PARAMETER>value' ~ ns ~ '</PARAMETER>' }}
{{- ns ~ '</invoke>\n' ~ ns ~ '</tool_call>' }}
{%- endif -%}
{{ '[e~[\n' }}
{%- for message in rest -%}
{%- if message.role == 'assistant' -%}
{{ ']~b]ai\n' }}
{%- if message.reasoning_content -%}
{{ '<mm:think>' ~ message.reasoning_content ~ '</mm:think>' }}
{%- endif -%}
{{ text(message.content) }}
{%- if message.tool_calls -%}
{{ ns ~ '<tool_call>\n' }}
{%- for call in message.tool_calls -%}
{%- set function = call.function or call -%}
{{ ns ~ '<invoke name="' ~ function.name ~ '">' }}
{%- if function.arguments is mapping -%}
{%- for key, value in function.arguments.items() -%}{{ element(key, value) }}{%- endfor -%}
{%- elif function.arguments -%}{{ function.arguments }}{%- endif -%}
{{ ns ~ '</invoke>\n' }}
{%- endfor -%}
{{ ns ~ '</tool_call>' }}
{%- endif -%}
{{ '[e~[\n' }}
{%- elif message.role == 'tool' -%}
{{ ']~b]tool\n<response>' ~ text(message.content) ~ '</response>[e~[\n' }}
{%- elif message.role in ['user', 'system', 'developer'] -%}
{{ ']~b]' ~ message.role ~ '\n' ~ text(message.content) ~ '[e~[\n' }}
{%- else -%}
{{ raise_exception('unknown role: ' ~ message.role) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ ']~b]ai\n' }}
{%- if thinking_mode is defined and thinking_mode == 'enabled' -%}{{ '<mm:think>' }}{%- endif -%}
{%- endif -%}
""".lstrip()


def build_tokenizer(vocab_size: int) -> Tokenizer:
    """Train the tokenizer; exactly `vocab_size` tokens.

    Raises:
        ValueError: the vocabulary is too small for the bytes and the special tokens.
    """
    if vocab_size < SMALLEST_VOCAB:
        raise ValueError(f"vocab_size: expected at least {SMALLEST_VOCAB}, got {vocab_size}")
    text_size = vocab_size - len(SPECIAL_TOKENS) - len(MARKUP_TOKENS)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=text_size,
        min_frequency=1,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    fillers = text_size - tokenizer.get_vocab_size()
    tokenizer.add_tokens([AddedToken(f"<unused {i}>", normalized=False) for i in range(fillers)])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in MARKUP_TOKENS])
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in SPECIAL_TOKENS])
    assert tokenizer.get_vocab_size() == vocab_size
    return tokenizer


def plain_text_ids(tokenizer: Tokenizer) -> list[int]:
    """Ids whose bytes are whole printable ASCII text: what a demo should show."""
    keep = []
    for token, token_id in tokenizer.get_vocab().items():
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        is_markup = token in MARKUP_TOKENS + SPECIAL_TOKENS or token.startswith("<unused ")
        if text.isascii() and not is_markup and (text.isprintable() or text in ("\n", "\n\n")):
            keep.append(token_id)
    return sorted(keep)


def write_tokenizer(directory: Path, tokenizer: Tokenizer, max_length: int) -> dict[str, int]:
    """Write tokenizer.json, its config and the chat template; returns the ids of named tokens."""
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "unk_token": UNK,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    _write_json(directory / "tokenizer_config.json", config)
    _write_json(
        directory / "special_tokens_map.json",
        {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD, "unk_token": UNK},
    )
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    names = {"bos": BOS, "eos": EOS, "pad": PAD, "image": IMAGE, "video": VIDEO}
    return {name: tokenizer.token_to_id(token) for name, token in names.items()}


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
