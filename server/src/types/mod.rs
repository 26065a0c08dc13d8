//! Wire types of the requests and answers. Unknown fields of a request are refused; `null` means "left out".
//!
//! The OpenAPI document is generated from these types, so that it cannot say anything else.

pub mod answer;
pub mod canopy;
mod chat;
mod completion;
mod object;
mod shapes;
mod shared;
pub mod tokens;
mod unique;

pub use chat::{ChatMessageBody, ChatRequest, ToolBody, ToolFunctionBody};
pub use completion::CompletionRequest;
pub use object::Object;
pub use shapes::{
    ContentShape, FormatShape, PartShape, PromptShape, SchemaShape, StopShape, ToolCallShape,
    ToolChoiceShape, ToolChoiceWord, ToolNameShape,
};
pub use shared::{CanopyBody, CanopyOptionsBody, ModeBody, Shared, SpeculationBody, StreamOptions};
pub use unique::Unique;
