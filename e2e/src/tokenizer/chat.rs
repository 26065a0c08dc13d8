//! Chat templates in Jinja, as checkpoints carry them.

use std::io;

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, ErrorKind, State, UndefinedBehavior};
use serde::Serialize;
use serde_json::ser::Formatter;
use serde_json::{Map, Value};

use super::special_token;
use crate::chat::ChatInput;
use crate::{Error, Result};

const NAME: &str = "chat_template";
const SPECIAL_TOKENS: [&str; 4] = ["bos_token", "eos_token", "pad_token", "unk_token"];

/// A compiled template and the special tokens it may name.
#[derive(Debug)]
pub(super) struct ChatTemplate {
    environment: Environment<'static>,
    special_tokens: Map<String, Value>,
}

/// The template in a `tokenizer_config.json`: a string, or the one called `default` in a list of named ones.
pub(super) fn template_of(config: &Map<String, Value>) -> Option<&str> {
    let value = config.get("chat_template")?;
    let named = |list: &'_ Vec<Value>| {
        let default =
            list.iter().position(|entry| entry.get("name").and_then(Value::as_str) == Some("default"));
        default.unwrap_or(0)
    };
    match value {
        Value::Array(list) => list.get(named(list))?.get("template")?.as_str(),
        one => one.as_str(),
    }
}

impl ChatTemplate {
    /// Compiles `source` in the dialect of transformers: trimmed blocks, Python string methods, `tojson` as
    /// Python writes it, `raise_exception`.
    pub(super) fn new(source: String, config: &Map<String, Value>) -> Result<Self> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(template_error)?);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment.add_filter("tojson", to_json);
        environment.add_template_owned(NAME, source).map_err(template_error)?;
        let token = |key: &str| special_token(config, key).map(|token| (key.to_owned(), token.into()));
        Ok(Self { environment, special_tokens: SPECIAL_TOKENS.into_iter().filter_map(token).collect() })
    }

    /// Renders a conversation.
    pub(super) fn render(&self, input: &ChatInput, add_generation_prompt: bool) -> Result<String> {
        let mut context = self.special_tokens.clone();
        context.extend(input.variables.clone());
        context.insert("messages".into(), input.messages.clone().into());
        if !input.tools.is_empty() {
            context.insert("tools".into(), input.tools.clone().into());
        }
        context.insert("add_generation_prompt".into(), add_generation_prompt.into());
        let template = self.environment.get_template(NAME).map_err(template_error)?;
        template.render(minijinja::value::Serde(context)).map_err(template_error)
    }
}

fn template_error(error: minijinja::Error) -> Error {
    Error::Tokenizer(format!("chat template: {error}"))
}

fn raise_exception(message: String) -> std::result::Result<String, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
}

/// `json.dumps(value, ensure_ascii=False)`: unlike minijinja's own filter it escapes nothing for HTML.
fn to_json(
    _: &State<'_, '_>,
    value: minijinja::Value,
    options: minijinja::value::Kwargs,
) -> std::result::Result<String, minijinja::Error> {
    let indent: Option<usize> = options.get("indent")?;
    for ignored in ["ensure_ascii", "sort_keys", "separators"] {
        let _: Option<minijinja::Value> = options.get(ignored)?;
    }
    options.assert_all_used()?;
    let wrong =
        |error: serde_json::Error| minijinja::Error::new(ErrorKind::BadSerialization, error.to_string());
    let mut text = Vec::new();
    match indent {
        Some(width) => {
            let indent = " ".repeat(width);
            let formatter = serde_json::ser::PrettyFormatter::with_indent(indent.as_bytes());
            value
                .serialize(&mut serde_json::Serializer::with_formatter(&mut text, formatter))
                .map_err(wrong)?;
        }
        None => {
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut text, Spaced)).map_err(wrong)?;
        }
    }
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Python's separators: `", "` and `": "`.
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}
