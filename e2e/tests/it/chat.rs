//! Chat templates with tools, and tool calls read back out of answers.

use canopy_e2e::chat::{AnswerPart, ChatInput, ToolCallParser, tool_call_grammar};
use canopy_e2e::engine::{Constraint, FinishReason, GenerateRequest};
use canopy_e2e::files::ModelFiles;
use canopy_e2e::loader::{LoadOptions, load_target, load_tokenizer};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::embedded::{AR, DRAFTED, engine, ids};

/// The constructs that Qwen3.5's template uses: tools in the system turn, calls as nested tags, tool answers in a user
/// turn, thoughts of older turns left out, `enable_thinking`.
const TEMPLATE: &str = r#"{%- if tools and tools is iterable and tools is not mapping %}
    {{- '<|im_start|>system\n# Tools\n<tools>' }}
    {%- for tool in tools %}
        {{- "\n" }}{{- tool | tojson }}
    {%- endfor %}
    {{- '\n</tools><|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last_query=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last_query = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if message.reasoning_content is defined and loop.index0 > ns.last_query %}
            {{- '<think>\n' + message.reasoning_content.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- content }}
        {%- for tool_call in message.tool_calls or [] %}
            {{- '\n<tool_call>\n<function=' + tool_call.function.name + '>\n' }}
            {%- for key, value in tool_call.function.arguments | items %}
                {{- '<parameter=' + key + '>\n' }}
                {{- value if value is string else value | tojson }}
                {{- '\n</parameter>\n' }}
            {%- endfor %}
            {{- '</function>\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}
    {%- elif message.role in ['system', 'user'] %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- else %}
        {{- raise_exception('Unexpected message role: ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- else %}
        {{- '<think>\n' }}
    {%- endif %}
{%- endif %}
"#;

fn tools() -> Vec<Value> {
    vec![
        json!({"type": "function", "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                    "unit": {"enum": ["C", "F"]}
                },
                "required": ["city", "days"]
            }
        }}),
        json!({"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}),
    ]
}

/// The embedded tokenizer with [`TEMPLATE`].
fn tokenizer() -> std::sync::Arc<canopy_e2e::tokenizer::Tokenizer> {
    let dir = tempfile::tempdir().unwrap();
    let source = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("models/canopy-tiny/target");
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(source.join(file), dir.path().join(file)).unwrap();
    }
    std::fs::write(dir.path().join("chat_template.jinja"), TEMPLATE).unwrap();
    let target = load_target(&canopy_e2e::embedded::target(), &LoadOptions::default()).unwrap();
    let files = ModelFiles::Directory(dir.path().into());
    std::sync::Arc::new(load_tokenizer(&files, target.config()).unwrap())
}

#[test]
fn tools_calls_and_thoughts_are_rendered_by_the_models_template() {
    let tokenizer = tokenizer();
    let call = json!({"function": {"name": "weather", "arguments": {"city": "Ulm", "days": 2}}});
    let mut input = ChatInput {
        messages: vec![
            json!({"role": "user", "content": "Ulm?"}),
            json!({"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]}),
            json!({"role": "tool", "content": "rain"}),
        ],
        tools: tools(),
        ..ChatInput::default()
    };
    let prompt = tokenizer.chat(&input).unwrap();
    assert!(prompt.text.starts_with("<|im_start|>system\n# Tools\n<tools>\n{\"type\": \"function\""));
    let turns = "<|im_start|>user\nUlm?<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\n\n<tool_call>\n\
                 <function=weather>\n<parameter=city>\nUlm\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n\
                 </tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n";
    assert!(prompt.text.contains(turns), "{}", prompt.text);
    assert!(prompt.text.ends_with("<|im_start|>assistant\n<think>\n") && prompt.thinking);
    assert_eq!(prompt.tokens, tokenizer.encode(&prompt.text).unwrap());
    // What is worth saving is what the next turn starts with: everything up to where the answer is asked for.
    let kept = prompt.save_at.unwrap();
    let answer = tokenizer.encode("<|im_start|>assistant\n<think>\n").unwrap();
    assert_eq!(prompt.tokens[kept..], answer);
    input.messages.push(json!({"role": "assistant", "content": "Rain."}));
    input.messages.push(json!({"role": "user", "content": "Thanks"}));
    let system = prompt.text.find("<|im_start|>user").unwrap();
    assert!(tokenizer.chat(&input).unwrap().text.starts_with(&prompt.text[..system]));
    input.variables.insert("enable_thinking".into(), false.into());
    let prompt = tokenizer.chat(&input).unwrap();
    assert!(prompt.text.ends_with("<think>\n\n</think>\n\n") && !prompt.thinking);
    input.messages.push(json!({"role": "robot", "content": "x"}));
    assert!(tokenizer.chat(&input).unwrap_err().to_string().contains("Unexpected message role: robot"));
}

fn content(text: &str) -> AnswerPart {
    AnswerPart::Content(text.into())
}

fn call(name: &str, arguments: Value) -> AnswerPart {
    AnswerPart::Call { name: name.into(), arguments: arguments.to_string() }
}

/// The parts of an answer that comes in pieces, neighbouring content joined.
fn parts(pieces: &[&str]) -> Vec<AnswerPart> {
    let mut parser = ToolCallParser::new(&tools());
    let mut all: Vec<AnswerPart> = Vec::new();
    let came: Vec<AnswerPart> = pieces.iter().flat_map(|piece| parser.push(piece)).collect();
    for part in came.into_iter().chain(parser.finish()) {
        match (all.last_mut(), part) {
            (Some(AnswerPart::Content(before)), AnswerPart::Content(text)) => before.push_str(&text),
            (_, part) => all.push(part),
        }
    }
    assert_eq!(parser.called(), all.iter().any(|part| matches!(part, AnswerPart::Call { .. })));
    all
}

const NESTED: &str = "<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n3\n\
                      </parameter>\n</function>\n</tool_call>";

#[test]
fn calls_are_read_in_both_formats() {
    let weather = || call("weather", json!({"city": "12", "days": 3}));
    assert_eq!(parts(&[NESTED]), [weather()]);
    assert_eq!(parts(&["Let me look.\n\n", NESTED, "\n"]), [content("Let me look."), weather()]);
    let json = "<tool_call>\n{\"name\": \"now\", \"arguments\": {\"a\": \"</tool_call>\"}}\n</tool_call>";
    assert_eq!(parts(&[NESTED, "\n", json]), [weather(), call("now", json!({"a": "</tool_call>"}))]);
    let empty = "<tool_call>\n<function=now>\n</function>\n</tool_call>";
    assert_eq!(parts(&[empty]), [call("now", json!({}))]);
    let words = "<tool_call>\n<function=f>\n<parameter=a>\nTrue\n</parameter>\n<parameter=b>\nNone\n</parameter>\n</function>\n</tool_call>";
    assert_eq!(parts(&[words]), [call("f", json!({"a": true, "b": null}))]);
    let lines = "<tool_call><function=f><parameter=x>\na\n\nb</c>\n</parameter></function></tool_call>";
    assert_eq!(parts(&[lines]), [call("f", json!({"x": "a\n\nb</c>"}))]);
}

#[test]
fn what_is_no_call_stays_content() {
    for text in ["a <tool", "a <tool_call> b", "<tool_call>{\"name\": 3}</tool_call> and on", "x\n", " \n"] {
        assert_eq!(parts(&[text]), [content(text)], "{text:?}");
    }
    let mut parser = ToolCallParser::new(&[]);
    assert_eq!(parser.push("2 < 3 <t"), [content("2 < 3")]);
    assert_eq!(parser.push("a"), [content(" <ta")], "decided text is not held back");
}

proptest! {
    /// However an answer is cut into pieces, its parts are the same, and without a call nothing is lost.
    #[test]
    fn pieces_do_not_matter(
        picks in prop::collection::vec(0usize..9, 0..9),
        cuts in prop::collection::vec(0usize..400, 0..12),
    ) {
        let pieces = [
            NESTED, "<tool_call>", "</tool_call>", "text", "\n", " ", "<tool_call>\n{\"name\": \"now\"}\n</tool_call>",
            "<function=weather>", "\u{e4}<",
        ];
        let text: String = picks.iter().map(|&pick| pieces[pick]).collect();
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| text.floor_char_boundary(cut % (text.len() + 1))).collect();
        cuts.extend([0, text.len()]);
        cuts.sort_unstable();
        let cut: Vec<&str> = cuts.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
        let whole = parts(&[&text]);
        prop_assert_eq!(&parts(&cut), &whole);
        if let [AnswerPart::Content(content)] = &whole[..] {
            prop_assert_eq!(content, &text);
        }
    }
}

#[test]
fn a_required_call_is_made_and_read_back_in_every_mode() {
    let (mut engine, tokenizer) = engine(1, Some(512));
    let prompt = tokenizer.encode("def weather(city):\n").unwrap();
    assert_eq!(tool_call_grammar(&tools(), Some("other")), None);
    for name in [Some("weather"), Some("now"), None] {
        let grammar = tool_call_grammar(&tools(), name).unwrap();
        let request = GenerateRequest {
            constraint: Constraint::Grammar(grammar),
            ..GenerateRequest::new(prompt.clone(), 300)
        };
        let got = engine.run(GenerateRequest { speculation: AR, ..request.clone() }).unwrap();
        if got.reason == FinishReason::Stop {
            let read = parts(&[&got.text]);
            let [AnswerPart::Call { name: called, arguments }] = &read[..] else { panic!("{}", got.text) };
            assert!(name.is_none_or(|name| name == called), "{}", got.text);
            let arguments: Value = serde_json::from_str(arguments).unwrap();
            if called == "weather" {
                assert!(arguments["city"].is_string(), "{arguments}");
                assert!((1..=9).contains(&arguments["days"].as_u64().unwrap()), "{arguments}");
            }
        }
        assert!(name != Some("now") || got.reason == FinishReason::Stop, "{}", got.text);
        for speculation in [DRAFTED[0], DRAFTED[4], DRAFTED[6]] {
            let drafted = engine.run(GenerateRequest { speculation, ..request.clone() }).unwrap();
            assert_eq!(ids(&drafted), ids(&got));
        }
    }
}
