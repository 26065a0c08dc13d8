//! A JSON object whose errors name the key.

use serde_json::{Map, Value};

use crate::{Error, Result};

/// The largest size of anything: far above every published model, and small enough that a product of two fits.
const MOST: usize = 1 << 24;
/// The most layers.
const MOST_LAYERS: usize = 4096;

/// One JSON object of a configuration file. Every getter returns `None` for a missing or null key and an error
/// that names the key, what was expected and what came for an ill-typed one.
#[derive(Clone, Debug)]
pub struct Table<'a> {
    what: String,
    prefix: String,
    map: &'a Map<String, Value>,
}

impl<'a> Table<'a> {
    /// The object in `value`; `what` names the file in errors.
    pub fn new(what: impl Into<String>, value: &'a Value) -> Result<Self> {
        let what = what.into();
        match value.as_object() {
            Some(map) => Ok(Self { what, prefix: String::new(), map }),
            None => {
                Err(Error::Config { what, key: "(whole file)".into(), message: wrong("an object", value) })
            }
        }
    }

    /// An error about `key`.
    pub fn error(&self, key: &str, message: impl Into<String>) -> Error {
        Error::Config {
            what: self.what.clone(),
            key: format!("{}{key}", self.prefix),
            message: message.into(),
        }
    }

    /// The value of `key`, `None` when missing or null.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// Unwraps an optional key that must be there.
    pub fn need<T>(&self, key: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| self.error(key, "expected a value, got none"))
    }

    /// The nested object `key`.
    pub fn table(&self, key: &str) -> Result<Option<Table<'a>>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let map = value.as_object().ok_or_else(|| self.error(key, wrong("an object", value)))?;
        Ok(Some(Table { what: self.what.clone(), prefix: format!("{}{key}.", self.prefix), map }))
    }

    /// A non-negative integer.
    pub fn usize(&self, key: &str) -> Result<Option<usize>> {
        self.scalar(key, "a non-negative integer", as_usize)
    }

    /// A non-negative integer that must be there.
    pub fn need_usize(&self, key: &str) -> Result<usize> {
        self.usize(key).and_then(|value| self.need(key, value))
    }

    /// A size that must be there; see [`Self::size`].
    pub fn need_positive(&self, key: &str) -> Result<usize> {
        Self::size(key, self.need_usize(key)?).map_err(|message| self.error(key, message))
    }

    /// Checks a size: at least 1, and no more than memory and products of sizes can take.
    pub fn size(key: &str, value: usize) -> std::result::Result<usize, String> {
        let most = if key == "num_hidden_layers" { MOST_LAYERS } else { MOST };
        match value {
            0 => Err("expected at least 1, got 0".into()),
            _ if value > most => Err(format!("expected at most {most}, got {value}")),
            _ => Ok(value),
        }
    }

    /// A finite number.
    pub fn f64(&self, key: &str) -> Result<Option<f64>> {
        self.scalar(key, "a number", Value::as_f64)
    }

    /// A boolean.
    pub fn bool(&self, key: &str) -> Result<Option<bool>> {
        self.scalar(key, "true or false", Value::as_bool)
    }

    /// A string.
    pub fn str(&self, key: &str) -> Result<Option<&'a str>> {
        self.scalar(key, "a string", Value::as_str)
    }

    /// A list of non-negative integers.
    pub fn usizes(&self, key: &str) -> Result<Option<Vec<usize>>> {
        self.scalar(key, "a list of non-negative integers", |value| {
            value.as_array()?.iter().map(as_usize).collect()
        })
    }

    /// A list of strings.
    pub fn strs(&self, key: &str) -> Result<Option<Vec<&'a str>>> {
        self.scalar(key, "a list of strings", |value| value.as_array()?.iter().map(Value::as_str).collect())
    }

    /// Token ids given as one integer, a list of integers, or null.
    pub fn token_ids(&self, key: &str) -> Result<Vec<u32>> {
        let ids = self.scalar(key, "a token id or a list of token ids", |value| match value {
            Value::Array(list) => list.iter().map(as_u32).collect(),
            one => as_u32(one).map(|id| vec![id]),
        })?;
        Ok(ids.unwrap_or_default())
    }

    fn scalar<T>(
        &self,
        key: &str,
        expected: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| self.error(key, wrong(expected, value)))
    }
}

fn wrong(expected: &str, got: &Value) -> String {
    let got: String = got.to_string().chars().take(80).collect();
    format!("expected {expected}, got {got}")
}

fn as_usize(value: &Value) -> Option<usize> {
    value.as_u64().and_then(|value| value.try_into().ok())
}

fn as_u32(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|value| value.try_into().ok())
}
