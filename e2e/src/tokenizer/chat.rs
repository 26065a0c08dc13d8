//! Chat templates in Jinja, as checkpoints carry them.

mod python;

use std::collections::HashSet;

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, UndefinedBehavior};
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
    /// Compiles `source` in the dialect of transformers: trimmed blocks, Python string methods, values and JSON as
    /// Python writes them, `raise_exception`, `strftime_now`.
    pub(super) fn new(source: String, config: &Map<String, Value>) -> Result<Self> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(template_error)?);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        python::add_to(&mut environment);
        environment.add_template_owned(NAME, source).map_err(template_error)?;
        let token = |key: &str| special_token(config, key).map(|token| (key.to_owned(), token.into()));
        Ok(Self { environment, special_tokens: SPECIAL_TOKENS.into_iter().filter_map(token).collect() })
    }

    /// Names that the template takes from outside, functions included.
    pub(super) fn variables(&self) -> HashSet<String> {
        self.environment.get_template(NAME).map_or_else(|_| HashSet::new(), |t| t.undeclared_variables(false))
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
