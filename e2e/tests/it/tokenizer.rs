//! Tokens and text: round trips, characters split over tokens, special tokens, stop tokens, chat templates.

use std::path::Path;

use canopy_e2e::embedded;
use canopy_e2e::files::ModelFiles;
use canopy_e2e::loader::{LoadOptions, load_target, load_tokenizer};
use canopy_e2e::tokenizer::{ChatMessage, Tokenizer};
use serde_json::{Value, json};

use crate::support::*;

const TEXTS: [&str; 6] = [
    "def fibonacci(n):\n    return n\n",
    "  leading and trailing  ",
    "naïve café — “quotes” … 北京 Привет\t\r\n",
    "🦀🌳👩‍👩‍👧‍👦 e\u{301} \u{10FFFF}\u{0}",
    "",
    "\n\n \n",
];

fn tiny() -> Tokenizer {
    Tokenizer::load(&embedded::target(), &[6140]).unwrap()
}

fn message(role: &str, content: &str) -> ChatMessage {
    ChatMessage { role: role.into(), content: content.into() }
}

#[test]
fn texts_survive_a_round_trip() {
    let tokenizer = tiny();
    for text in TEXTS {
        assert_eq!(tokenizer.decode(&tokenizer.encode(text).unwrap()).unwrap(), text);
    }
    assert_eq!(tokenizer.vocab_size(), 6144);
}

#[test]
fn golden_ids() {
    let tokenizer = tiny();
    let golden_ids = tensors(golden("canopy-tiny/golden.safetensors"));
    let json = std::fs::read(golden("canopy-tiny/golden.json")).unwrap();
    let golden: Value = serde_json::from_slice(&json).unwrap();
    for (i, prompt) in golden["prompts"].as_array().unwrap().iter().enumerate() {
        let ids: Vec<u32> = ints(&golden_ids[&format!("p{i}.ids")]);
        assert_eq!(tokenizer.encode(prompt["text"].as_str().unwrap()).unwrap(), ids);
        let greedy: Vec<u32> = ints(&golden_ids[&format!("p{i}.greedy")]);
        assert_eq!(tokenizer.decode(&greedy).unwrap(), prompt["greedy_text"].as_str().unwrap());
    }
}

/// Known failure 26: a character split over several tokens arrives as one chunk, and no U+FFFD ever does.
#[test]
fn split_characters_arrive_whole() {
    let tokenizer = tiny();
    let mut split = 0;
    for text in TEXTS {
        let ids = tokenizer.encode(text).unwrap();
        let mut detokenizer = tokenizer.detokenizer();
        let mut chunks: Vec<String> = ids.iter().map(|&id| detokenizer.push(id)).collect();
        split += chunks.iter().filter(|chunk| chunk.is_empty()).count();
        chunks.push(detokenizer.finish());
        assert!(chunks.iter().all(|chunk| !chunk.contains('\u{FFFD}')), "{chunks:?}");
        assert_eq!(chunks.concat(), text);
    }
    assert!(split >= 10, "only {split} tokens end inside a character: the texts prove nothing");

    let ids = tokenizer.encode("🦀").unwrap();
    assert!(ids.len() >= 3);
    let mut detokenizer = tokenizer.detokenizer();
    let (last, first) = ids.split_last().unwrap();
    assert!(first.iter().all(|&id| detokenizer.push(id).is_empty()));
    assert_eq!(detokenizer.push(*last), "🦀");
}

/// Streams do not share what waits.
#[test]
fn detokenizers_are_independent() {
    let tokenizer = tiny();
    let ids = tokenizer.encode("é🦀").unwrap();
    let mut texts = [String::new(), String::new()];
    let mut streams = [tokenizer.detokenizer(), tokenizer.detokenizer()];
    for &id in &ids {
        for (text, stream) in texts.iter_mut().zip(&mut streams) {
            text.push_str(&stream.push(id));
        }
    }
    assert_eq!(texts, ["é🦀", "é🦀"]);
}

#[test]
fn broken_bytes_and_cut_characters() {
    let tokenizer = tiny();
    let crab = tokenizer.encode("🦀").unwrap();
    let a = tokenizer.encode("a").unwrap();
    let mut detokenizer = tokenizer.detokenizer();
    assert_eq!(detokenizer.push(crab[0]), "");
    assert_eq!(detokenizer.finish(), "");
    assert_eq!(detokenizer.push(a[0]), "a");

    let broken = [&crab[..1], &a[..], &crab[..]].concat();
    assert_eq!(tokenizer.decode(&broken).unwrap(), "\u{FFFD}a🦀");
    assert_eq!(tokenizer.decode(&[a[0], 99_999]).unwrap(), "a");
}

#[test]
fn special_tokens_are_recognised_and_silent() {
    let tokenizer = tiny();
    let ids = tokenizer.encode("<|im_start|>user\nhi<|im_end|>").unwrap();
    assert_eq!((ids[0], ids[ids.len() - 1]), (6141, 6142));
    assert_eq!(tokenizer.decode(&ids).unwrap(), "user\nhi");
    assert_eq!(tokenizer.token_text(6142), "<|im_end|>");
    assert_eq!(tokenizer.token_text(ids[1]), "user");
}

/// The union of config, generation config and tokenizer; without a generation config the tokenizer's still counts.
#[test]
fn stop_tokens_are_a_union() {
    let options = LoadOptions { slots: 1, context_len: Some(8), ..LoadOptions::default() };
    let target = load_target(&embedded::target(), &options).unwrap();
    assert_eq!(target.config().eos_token_ids, [6140, 6142]);
    assert_eq!(load_tokenizer(&embedded::target(), target.config()).unwrap().stop_tokens(), [6140, 6142]);
    assert_eq!(tiny().stop_tokens(), [6140, 6142]);
    assert_eq!(Tokenizer::load(&embedded::target(), &[6142, 7]).unwrap().stop_tokens(), [6142, 7]);
}

#[test]
fn the_embedded_chat_template() {
    let prompt = tiny().chat_prompt(&[message("user", "Reverse a string.")]).unwrap();
    assert_eq!(prompt, "<|im_start|>user\nReverse a string.<|im_end|>\n<|im_start|>assistant\n");
}

/// A directory with the embedded tokenizer, a tokenizer config and a template file.
fn with_template(config: Value, jinja: Option<&str>) -> (tempfile::TempDir, canopy_e2e::Result<Tokenizer>) {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = embedded::target().require("tokenizer.json").unwrap();
    std::fs::write(dir.path().join("tokenizer.json"), tokenizer).unwrap();
    std::fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    if let Some(jinja) = jinja {
        std::fs::write(dir.path().join("chat_template.jinja"), jinja).unwrap();
    }
    let tokenizer = Tokenizer::load(&ModelFiles::Directory(dir.path().into()), &[]);
    (dir, tokenizer)
}

fn render(jinja: &str, messages: &[ChatMessage]) -> canopy_e2e::Result<String> {
    with_template(json!({"eos_token": {"content": "<|im_end|>"}}), Some(jinja)).1?.chat_prompt(messages)
}

/// What published templates use: namespaces, macros, Python string methods, slices, neighbours, block trimming.
#[test]
fn templates_in_the_dialect_of_transformers() {
    let jinja = "\
{%- macro turn(role, text) %}
    {{- '<|im_start|>' + role + '\\n' + text + eos_token + '\\n' }}
{%- endmacro %}
{%- macro plain(content, strict=false) %}
    {%- if content is string %}
        {{- content }}
    {%- elif content is iterable and content is not mapping or content is none or strict %}
        {{- raise_exception('Unexpected content type.') }}
    {%- endif %}
{%- endmacro %}
{%- if tools and tools is iterable and tools is not mapping %}
    {{- '<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' ~ (tool | tojson | safe if tool is mapping else tool | string) }}
    {%- endfor %}
    {{- '\\n</tools>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- if ns.last == -1 and message.role == 'user' %}
        {%- set ns.last = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {% set text = plain(message.content, true)|trim %}
    {% if text.startswith('<think>') and loop.index0 < ns.last %}
        {%- set text = text.split('</think>')[-1].lstrip('\\n') %}
    {% endif %}
    {%- if loop.previtem is defined and loop.previtem.role == message.role %}
        {{- raise_exception('two turns of ' + message.role) }}
    {%- endif %}
    {{- turn(message.role, text) }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}";
    let turns =
        [message("user", "  hi "), message("assistant", "<think>x</think>\nyes"), message("user", "ok")];
    let text = render(jinja, &turns).unwrap();
    let turns_text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n<|im_start|>user\nok<|im_end|>\n";
    assert_eq!(text, format!("{turns_text}<|im_start|>assistant\n"));

    let (_dir, tokenizer) = with_template(json!({"eos_token": "<|im_end|>"}), Some(jinja));
    let off = json!({"enable_thinking": false, "tools": [{"name": "f", "at": [1, 2]}, "g"]});
    let text = tokenizer.unwrap().chat_prompt_with(&turns, off.as_object().unwrap()).unwrap();
    let tools = "<tools>\n{\"name\": \"f\", \"at\": [1, 2]}\ng\n</tools>\n";
    assert_eq!(text, format!("{tools}{turns_text}<|im_start|>assistant\n<think>\n\n</think>\n\n"));

    let error = render(jinja, &[message("user", "a"), message("user", "b")]).unwrap_err().to_string();
    assert!(
        error.starts_with("tokenizer: chat template: ") && error.contains("two turns of user"),
        "{error}"
    );
}

#[test]
fn tojson_is_pythons() {
    let text = render("{{ messages | tojson }}", &[message("user", "<a> & 'b' é \"q\"")]).unwrap();
    assert_eq!(text, r#"[{"role": "user", "content": "<a> & 'b' é \"q\""}]"#);
    let text = render("{{ {'a': [1, 2]} | tojson(indent=2) }}", &[]).unwrap();
    assert_eq!(text, "{\n  \"a\": [\n    1,\n    2\n  ]\n}");
}

#[test]
fn where_a_template_comes_from() {
    let named = json!([{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]);
    let turns = [message("user", "x")];
    let prompt = |config: Value, jinja| with_template(config, jinja).1.unwrap().chat_prompt(&turns);
    assert_eq!(prompt(json!({"chat_template": "string"}), None).unwrap(), "string");
    assert_eq!(prompt(json!({"chat_template": named}), None).unwrap(), "yes");
    assert_eq!(prompt(json!({"chat_template": "string"}), Some("file")).unwrap(), "file");
    let error = prompt(json!({}), None).unwrap_err().to_string();
    assert_eq!(error, "tokenizer: the model has no chat template");
}

#[test]
fn broken_tokenizers_are_named() {
    let error = |config: Value, jinja| with_template(config, jinja).1.unwrap_err().to_string();
    assert!(
        error(json!({"eos_token": "</s>"}), None).contains("eos_token: expected a token of the vocabulary")
    );
    assert!(error(json!([]), None).contains("tokenizer_config.json: expected an object"));
    assert!(error(json!({}), Some("{% if %}")).starts_with("tokenizer: chat template: "));
    let missing = Tokenizer::load(&ModelFiles::Directory(Path::new("/nowhere").into()), &[]).unwrap_err();
    assert!(missing.to_string().contains("/nowhere/tokenizer.json"), "{missing}");

    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
    let broken = Tokenizer::load(&ModelFiles::Directory(dir.path().into()), &[]).unwrap_err().to_string();
    assert!(broken.contains("tokenizer.json: "), "{broken}");
}
