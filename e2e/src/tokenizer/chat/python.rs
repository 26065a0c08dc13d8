//! What templates expect of Python: functions that transformers adds, and values and JSON as Python writes them.

use std::fmt::Write as _;
use std::io;
use std::time::SystemTime;

use chrono::{DateTime, Utc};
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State, Value, escape_formatter};
use serde::Serialize;
use serde_json::ser::Formatter;

pub(super) fn add_to(environment: &mut Environment<'_>) {
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment.add_filter("tojson", to_json);
    environment.add_filter("string", |value: Value| written(&value).unwrap_or_else(|| value.to_string()));
    environment.set_formatter(write_value);
}

fn wrong(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

fn raise_exception(message: String) -> Result<String, Error> {
    Err(wrong(message))
}

/// The time of day in UTC, by the C library's format.
fn strftime_now(format: &str) -> Result<String, Error> {
    let mut text = String::new();
    let now = DateTime::<Utc>::from(SystemTime::now());
    write!(text, "{}", now.format(format))
        .map_err(|_| wrong(format!("strftime_now: no time format: {format}")))?;
    Ok(text)
}

fn write_value(output: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    match written(value) {
        Some(text) => output.write_str(&text).map_err(|_| Error::from(ErrorKind::WriteFailure)),
        None => escape_formatter(output, state, value),
    }
}

/// `str(value)` where it differs from minijinja's: truth, nothing, floats.
fn written(value: &Value) -> Option<String> {
    match value.kind() {
        ValueKind::Bool => Some(if value.is_true() { "True" } else { "False" }.to_owned()),
        ValueKind::None => Some("None".to_owned()),
        ValueKind::Number if !value.is_integer() => f64::try_from(value.clone()).ok().map(float),
        _ => None,
    }
}

/// `repr` of a float: the shortest digits that read back, an exponent of two digits beyond 1e16 and below 1e-4.
fn float(value: f64) -> String {
    if !value.is_finite() {
        return if value.is_nan() {
            "nan"
        } else if value > 0.0 {
            "inf"
        } else {
            "-inf"
        }
        .to_owned();
    }
    if value != 0.0 && !(1e-4..1e16).contains(&value.abs()) {
        let text = format!("{value:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |exponent| ('-', exponent));
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    let text = value.to_string();
    if text.contains('.') { text } else { text + ".0" }
}

/// `json.dumps(value, ensure_ascii=False)` with its options: unlike minijinja's own filter it escapes nothing for HTML.
fn to_json(value: Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let ascii: Option<bool> = options.get("ensure_ascii")?;
    let sorted: Option<bool> = options.get("sort_keys")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    options.assert_all_used()?;
    let [item, key] = match separators {
        None => [if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()],
        Some(both) => both.try_into().map_err(|_| wrong("tojson: separators: expected two strings"))?,
    };
    let bad = |error: serde_json::Error| Error::new(ErrorKind::BadSerialization, error.to_string());
    let mut json = serde_json::to_value(&value).map_err(bad)?;
    if sorted.unwrap_or(false) {
        json.sort_all_objects();
    }
    let mut text = Vec::new();
    let formatter = Dumps { indent, item, key, ascii: ascii.unwrap_or(false), depth: 0, filled: false };
    json.serialize(&mut serde_json::Serializer::with_formatter(&mut text, formatter)).map_err(bad)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// `json.dumps`'s layout.
struct Dumps {
    indent: Option<usize>,
    item: String,
    key: String,
    ascii: bool,
    depth: usize,
    /// The list or object that ends now has something in it.
    filled: bool,
}

impl Dumps {
    fn new_line<W: ?Sized + io::Write>(&self, writer: &mut W) -> io::Result<()> {
        match self.indent {
            Some(width) => write!(writer, "\n{:1$}", "", width * self.depth),
            None => Ok(()),
        }
    }

    fn begin<W: ?Sized + io::Write>(&mut self, writer: &mut W, open: &str) -> io::Result<()> {
        self.depth += 1;
        self.filled = false;
        writer.write_all(open.as_bytes())
    }

    fn next<W: ?Sized + io::Write>(&self, writer: &mut W, first: bool) -> io::Result<()> {
        if !first {
            writer.write_all(self.item.as_bytes())?;
        }
        self.new_line(writer)
    }

    fn end<W: ?Sized + io::Write>(&mut self, writer: &mut W, close: &str) -> io::Result<()> {
        self.depth -= 1;
        if self.filled {
            self.new_line(writer)?;
        }
        writer.write_all(close.as_bytes())
    }
}

impl Formatter for Dumps {
    fn write_f64<W: ?Sized + io::Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        writer.write_all(float(value).as_bytes())
    }

    fn write_string_fragment<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        fragment: &str,
    ) -> io::Result<()> {
        if !self.ascii {
            return writer.write_all(fragment.as_bytes());
        }
        for unit in fragment.encode_utf16() {
            match u8::try_from(unit) {
                Ok(byte @ b' '..=b'~') => writer.write_all(&[byte])?,
                _ => write!(writer, "\\u{unit:04x}")?,
            }
        }
        Ok(())
    }

    fn begin_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.begin(writer, "[")
    }

    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.next(writer, first)
    }

    fn end_array_value<W: ?Sized + io::Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.filled = true;
        Ok(())
    }

    fn end_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.end(writer, "]")
    }

    fn begin_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.begin(writer, "{")
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.next(writer, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(self.key.as_bytes())
    }

    fn end_object_value<W: ?Sized + io::Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.filled = true;
        Ok(())
    }

    fn end_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.end(writer, "}")
    }
}
