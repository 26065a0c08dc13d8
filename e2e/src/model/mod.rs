//! The Qwen3.5 text model.
