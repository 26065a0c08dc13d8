//! The pair compiled into the binary, so that everything runs with no download.

use crate::files::ModelFiles;

/// Name of the embedded pair.
pub const NAME: &str = "canopy-tiny";

/// Statics, since a constant is compiled into every unit that uses it.
type Files = &'static [(&'static str, &'static [u8])];

macro_rules! embed {
    ($dir:literal, $($file:literal),+ $(,)?) => {
        &[$(($file, include_bytes!(concat!("../models/canopy-tiny/", $dir, "/", $file)))),+]
    };
}

static TARGET: Files = embed!(
    "target",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
);
static DRAFTER: Files = embed!("drafter", "config.json", "model.safetensors");

/// Files of the embedded target.
pub fn target() -> ModelFiles {
    ModelFiles::Memory { name: "embedded/target", files: TARGET }
}

/// Files of the embedded drafter.
pub fn drafter() -> ModelFiles {
    ModelFiles::Memory { name: "embedded/drafter", files: DRAFTER }
}
