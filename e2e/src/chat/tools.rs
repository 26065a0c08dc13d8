//! Tool calls in Qwen's two formats, read out of a growing answer.
//!
//! ```text
//! <tool_call>                          <tool_call>
//! <function=name>                      {"name": "name", "arguments": {"key": 1}}
//! <parameter=key>                      </tool_call>
//! value
//! </parameter>
//! </function>
//! </tool_call>
//! ```

use std::collections::HashMap;
use std::fmt::Write as _;

use serde_json::{Map, Value};

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";
const FUNCTION: &str = "<function=";
const PARAMETER: &str = "<parameter=";

/// A part of an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum AnswerPart {
    /// Text for the reader.
    Content(String),
    /// A whole call.
    Call {
        /// The function's name.
        name: String,
        /// Its arguments, a JSON object.
        arguments: String,
    },
}

/// Parts an answer into content and tool calls, however the text is cut into pieces.
///
/// Text is released as soon as it cannot be part of a call's beginning, a call when its end has come. What looks like
/// a call and is none is content. White space around calls belongs to nothing.
#[derive(Clone, Debug)]
pub struct ToolCallParser {
    /// Property name to its schema's type, by function.
    types: HashMap<String, HashMap<String, String>>,
    held: String,
    /// `held` starts with `<tool_call>`.
    inside: bool,
    /// White space that is content only when content follows.
    space: String,
    called: bool,
}

impl ToolCallParser {
    /// A parser for calls of `tools`, which are objects in OpenAI's form. Their schemas say which arguments are text;
    /// others are read as JSON where they are JSON.
    pub fn new(tools: &[Value]) -> Self {
        let typed = |tool: &Value| {
            let function = tool.get("function")?;
            let of = |(key, schema): (&String, &Value)| {
                Some((key.clone(), schema.get("type")?.as_str()?.to_owned()))
            };
            let properties = function.pointer("/parameters/properties").and_then(Value::as_object);
            let types = properties.into_iter().flatten().filter_map(of).collect();
            Some((function.get("name")?.as_str()?.to_owned(), types))
        };
        let types = tools.iter().filter_map(typed).collect();
        Self { types, held: String::new(), inside: false, space: String::new(), called: false }
    }

    /// True once a call has been read.
    pub fn called(&self) -> bool {
        self.called
    }

    /// Takes the next text and returns what is decided.
    pub fn push(&mut self, text: &str) -> Vec<AnswerPart> {
        self.held.push_str(text);
        let mut parts = Vec::new();
        while self.advance(&mut parts) {}
        parts
    }

    /// What was held back when the answer ended: an unfinished call is content.
    pub fn finish(&mut self) -> Vec<AnswerPart> {
        let mut parts = Vec::new();
        self.inside = false;
        let rest = std::mem::take(&mut self.held);
        self.content(&rest, &mut parts);
        if !self.called && !self.space.is_empty() {
            push_content(std::mem::take(&mut self.space), &mut parts);
        }
        parts
    }

    /// One step; false when more text is needed.
    fn advance(&mut self, parts: &mut Vec<AnswerPart>) -> bool {
        if self.inside {
            return self.close(parts);
        }
        if let Some(at) = self.held.find(OPEN) {
            let rest = self.held.split_off(at);
            let before = std::mem::replace(&mut self.held, rest);
            self.content(&before, parts);
            self.inside = true;
            return true;
        }
        let open = (1..OPEN.len()).rev().find(|&len| self.held.ends_with(&OPEN[..len])).unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - open);
        let decided = std::mem::replace(&mut self.held, rest);
        self.content(&decided, parts);
        false
    }

    /// Reads the call at the start of the held text, if its end has come.
    fn close(&mut self, parts: &mut Vec<AnswerPart>) -> bool {
        let ends: Vec<usize> = self.held.match_indices(CLOSE).map(|(at, _)| at).collect();
        for at in ends {
            if let Some(call) = self.call(&self.held[OPEN.len()..at]) {
                parts.push(call);
                self.held.drain(..at + CLOSE.len());
                (self.inside, self.called) = (false, true);
                self.space.clear();
                return true;
            }
        }
        false
    }

    /// A call's body; `None` when it is none, or not whole.
    fn call(&self, body: &str) -> Option<AnswerPart> {
        let body = body.trim();
        if body.starts_with('{') {
            let mut call: Map<String, Value> = serde_json::from_str(body).ok()?;
            let name = call.get("name")?.as_str()?.to_owned();
            let arguments = match call.remove("arguments").unwrap_or_else(|| Map::new().into()) {
                Value::Object(arguments) => Value::Object(arguments).to_string(),
                // Some models write the object as a string.
                Value::String(text) => {
                    serde_json::from_str::<Map<String, Value>>(&text).ok().map(|_| text)?
                }
                _ => return None,
            };
            return Some(AnswerPart::Call { name, arguments });
        }
        let body = body.strip_prefix(FUNCTION)?.strip_suffix("</function>")?;
        let (name, parameters) = body.split_once('>')?;
        let name = name.trim().to_owned();
        let arguments = self.arguments(&name, parameters)?;
        Some(AnswerPart::Call { name, arguments: Value::Object(arguments).to_string() })
    }

    fn arguments(&self, name: &str, text: &str) -> Option<Map<String, Value>> {
        let mut arguments = Map::new();
        let mut pieces = text.split(PARAMETER);
        if !pieces.next()?.trim().is_empty() {
            return None;
        }
        for piece in pieces {
            let (key, value) = piece.split_once('>')?;
            let value = value.trim_end().strip_suffix("</parameter>")?;
            let value = value.strip_prefix('\n').unwrap_or(value);
            let value = value.strip_suffix('\n').unwrap_or(value);
            let is_text =
                self.types.get(name).and_then(|types| types.get(key)).is_some_and(|t| t == "string");
            let read = if is_text { None } else { json_or_python(value.trim()) };
            arguments.insert(key.trim().to_owned(), read.unwrap_or_else(|| value.into()));
        }
        Some(arguments)
    }

    /// Content, its white space at the end held back until more comes.
    fn content(&mut self, text: &str, parts: &mut Vec<AnswerPart>) {
        let body = text.trim_end();
        if body.is_empty() {
            self.space.push_str(text);
            return;
        }
        let mut whole = std::mem::take(&mut self.space);
        whole.push_str(body);
        self.space.push_str(&text[body.len()..]);
        push_content(whole, parts);
    }
}

/// A value in JSON, or one of the words that templates write for truth and nothing.
fn json_or_python(text: &str) -> Option<Value> {
    match text {
        "True" => Some(true.into()),
        "False" => Some(false.into()),
        "None" => Some(Value::Null),
        _ => serde_json::from_str(text).ok(),
    }
}

fn push_content(text: String, parts: &mut Vec<AnswerPart>) {
    match parts.last_mut() {
        Some(AnswerPart::Content(content)) => content.push_str(&text),
        _ => parts.push(AnswerPart::Content(text)),
    }
}

/// A grammar (Lark) of one call, in Qwen3.5's format, of any of `tools` or of the one called `name`: required arguments all
/// come, in the order of their schema. `None` when there is no such tool. For
/// [`Constraint::Grammar`](crate::engine::Constraint::Grammar).
pub fn tool_call_grammar(tools: &[Value], name: Option<&str>) -> Option<String> {
    let functions = tools.iter().filter_map(|tool| tool.get("function"));
    let called = |function: &&Value| {
        let own = function.get("name").and_then(Value::as_str);
        own.is_some() && name.is_none_or(|name| own == Some(name))
    };
    let (mut rules, mut calls) = (String::new(), Vec::new());
    for (index, function) in functions.filter(called).enumerate() {
        calls.push(format!("call_{index}"));
        let own = function.get("name").and_then(Value::as_str).unwrap_or_default();
        let opening = Value::from(format!("{OPEN}\n{FUNCTION}{own}>\n"));
        let _ = write!(rules, "call_{index}: {opening}");
        let mut values = String::new();
        let required = function.pointer("/parameters/required").and_then(Value::as_array);
        let properties = function.pointer("/parameters/properties").and_then(Value::as_object);
        for (at, (key, schema)) in properties.into_iter().flatten().enumerate() {
            let optional = match required.is_some_and(|list| list.iter().any(|name| name == key)) {
                true => "",
                false => "?",
            };
            let _ = write!(rules, " argument_{index}_{at}{optional}");
            let opening = Value::from(format!("{PARAMETER}{key}>\n"));
            let is_text =
                schema.get("type").is_none_or(|kind| kind == "string") && schema.get("enum").is_none();
            let _ = match is_text {
                true => writeln!(values, "argument_{index}_{at}: {opening} text"),
                false => match schema.get("enum").and_then(Value::as_array) {
                    Some(words) if words.iter().all(Value::is_string) => {
                        let words: Vec<String> = words.iter().map(Value::to_string).collect();
                        writeln!(
                            values,
                            "argument_{index}_{at}: {opening} ({}) \"\\n</parameter>\\n\"",
                            words.join(" | ")
                        )
                    }
                    _ => writeln!(
                        values,
                        "argument_{index}_{at}: {opening} value_{index}_{at} \"\\n</parameter>\\n\"\nvalue_{index}_{at}: %json {schema}"
                    ),
                },
            };
        }
        let _ = writeln!(rules, " \"</function>\\n{CLOSE}\"");
        rules.push_str(&values);
    }
    if calls.is_empty() {
        return None;
    }
    Some(format!("start: {}\n{rules}text[lazy]: /(.|\\n)*/ \"\\n</parameter>\\n\"\n", calls.join(" | ")))
}
