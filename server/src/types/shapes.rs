//! Shapes of the fields that come in several: what the OpenAPI document says of them. They are read as JSON values
//! and checked in `plan`, which can then name the very item that is wrong.

use serde::Serialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

/// `prompt`.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub enum PromptShape {
    /// Text.
    Text(String),
    /// Several texts.
    Texts(Vec<String>),
    /// Token ids.
    Tokens(Vec<u32>),
    /// Several prompts as token ids.
    TokenLists(Vec<Vec<u32>>),
}

/// `stop`.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub enum StopShape {
    /// One string.
    One(String),
    /// Several.
    Many(Vec<String>),
}

/// A message's `content`.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub enum ContentShape {
    /// Text.
    Text(String),
    /// Text in parts.
    Parts(Vec<PartShape>),
}

/// A part of a message's `content`.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum PartShape {
    /// Text.
    Text {
        /// The text.
        text: String,
    },
}

/// `response_format`.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum FormatShape {
    /// Any text.
    Text,
    /// One JSON object.
    JsonObject,
    /// JSON that a schema allows.
    JsonSchema {
        /// The schema.
        json_schema: SchemaShape,
    },
}

/// `response_format.json_schema`.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct SchemaShape {
    /// A name for people.
    pub name: Option<String>,
    /// What it is for.
    pub description: Option<String>,
    /// JSON Schema.
    #[schema(value_type = Object)]
    pub schema: Map<String, Value>,
    /// The text keeps to the schema either way.
    pub strict: Option<bool>,
}

/// `tool_choice`.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub enum ToolChoiceShape {
    /// In a word.
    Word(ToolChoiceWord),
    /// This one has to be called.
    Tool {
        /// `function`.
        r#type: String,
        /// Which.
        function: ToolNameShape,
    },
}

/// `tool_choice` in a word.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ToolChoiceWord {
    /// The model does not hear of the tools.
    None,
    /// The model may call tools or answer.
    Auto,
    /// The model has to call one.
    Required,
}

/// A tool by name.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ToolNameShape {
    /// Name.
    pub name: String,
}

/// A call that an assistant made.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ToolCallShape {
    /// Names the call.
    pub id: String,
    /// `function`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Which function, with which arguments.
    pub function: super::answer::ToolFunction,
}
