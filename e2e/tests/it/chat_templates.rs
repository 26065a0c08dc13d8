//! Chat templates against Python's jinja2: `tests/chat/cases.json`, which `tests/chat/make.py` writes.

use canopy_e2e::chat::ChatInput;
use canopy_e2e::files::ModelFiles;
use canopy_e2e::tokenizer::Tokenizer;
use serde_json::{Map, Value};

const CASES: &str = include_str!("../chat/cases.json");
const FEATURES: &str = include_str!("../chat/features.jinja");

/// The embedded tokenizer with another template.
fn with_template(jinja: &str) -> Tokenizer {
    let dir = tempfile::tempdir().unwrap();
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::write(dir.path().join(file), canopy_e2e::embedded::target().require(file).unwrap()).unwrap();
    }
    std::fs::write(dir.path().join("chat_template.jinja"), jinja).unwrap();
    Tokenizer::load(&ModelFiles::Directory(dir.path().into()), &[]).unwrap()
}

fn input(case: &Value) -> ChatInput {
    let mut variables: Map<String, Value> = case["variables"].as_object().unwrap().clone();
    let tools = variables.remove("tools").map_or(Vec::new(), |tools| tools.as_array().unwrap().clone());
    ChatInput { messages: case["messages"].as_array().unwrap().clone(), tools, variables }
}

/// The embedded template follows Qwen3.5's; the other one uses what published templates use. Refusals come word by word.
#[test]
fn conversations_are_what_jinja2_makes_of_them() {
    let embedded = Tokenizer::load(&canopy_e2e::embedded::target(), &[]).unwrap();
    let features = with_template(FEATURES);
    let cases: Vec<Value> = serde_json::from_str(CASES).unwrap();
    let (mut texts, mut refusals) = (0, 0);
    for case in &cases {
        let tokenizer = if case["template"] == "embedded" { &embedded } else { &features };
        let rendered = tokenizer.render_chat(&input(case), case["add_generation_prompt"] == true);
        let title = format!("{} with {}", case["case"], case["template"]);
        match (case["text"].as_str(), rendered) {
            (Some(text), Ok(rendered)) => {
                assert_eq!(rendered, text, "{title}");
                texts += 1;
            }
            (None, Err(error)) => {
                let raised = case["error"].as_str().unwrap();
                // What Python says of a missing attribute is its own.
                let ours = raised.contains("has no attribute") || error.to_string().contains(raised);
                assert!(ours, "{title}: {error}");
                refusals += 1;
            }
            (_, rendered) => panic!("{title}: {rendered:?}"),
        }
    }
    assert!(texts > 50 && refusals > 10, "{texts} texts, {refusals} refusals");
}

#[test]
fn the_date_of_a_prompt_is_todays() {
    let tokenizer = with_template("{{ strftime_now('%Y-%m-%d') }}|{{ strftime_now('%d %b %Y') | length }}");
    let today =
        || chrono::DateTime::<chrono::Utc>::from(std::time::SystemTime::now()).format("%Y-%m-%d").to_string();
    let before = today();
    let text = tokenizer.render_chat(&ChatInput::default(), true).unwrap();
    assert!([before, today()].contains(&text.replace("|11", "")), "{text}");
    let error =
        with_template("{{ strftime_now('%') }}").render_chat(&ChatInput::default(), true).unwrap_err();
    assert!(error.to_string().contains("strftime_now: no time format: %"), "{error}");
}

#[test]
fn what_a_template_takes_is_known() {
    let embedded = Tokenizer::load(&canopy_e2e::embedded::target(), &[]).unwrap();
    let takes = |tokenizer: &Tokenizer| {
        ["enable_thinking", "tools", "documents"].map(|name| tokenizer.template_takes(name))
    };
    assert_eq!(takes(&embedded), [true, true, false]);
    assert_eq!(takes(&with_template("{% for d in documents %}{{ d }}{% endfor %}")), [false, false, true]);
}
