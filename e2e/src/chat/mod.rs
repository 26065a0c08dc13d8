//! Conversations: what a template makes of one, and what is to be read out of an answer.

mod input;
mod tools;

pub use input::{ChatInput, ChatPrompt};
pub use tools::{AnswerPart, ToolCallParser, tool_call_grammar};
