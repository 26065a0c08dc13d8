//! Refusals of command line arguments, with what was expected.

use clap::error::ErrorKind;

/// Prints clap's refusal or help and ends the process as clap would; a number that cannot be read is told what one is.
pub fn refuse(error: clap::Error) -> ! {
    if error.kind() != ErrorKind::ValueValidation {
        error.exit();
    }
    eprint!("{}", explained(&error.to_string()));
    std::process::exit(2);
}

/// clap's words with the number parsers' own reasons replaced by what they expect.
fn explained(message: &str) -> String {
    let negative = message.contains("value '-");
    let whole = if negative { "expected a whole number from 0" } else { "expected a whole number" };
    [
        ("invalid digit found in string", whole),
        ("cannot parse integer from empty string", "expected a whole number"),
        ("number would be zero for non-zero type", "expected a whole number from 1"),
        ("number too large to fit in target type", "expected a smaller whole number"),
        ("number too small to fit in target type", "expected a larger whole number"),
        ("invalid float literal", "expected a number"),
        ("cannot parse float from empty string", "expected a number"),
    ]
    .iter()
    .fold(message.to_owned(), |message, (reason, expected)| message.replace(reason, expected))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_say_what_is_expected() {
        let command = || {
            clap::Command::new("c").arg(
                clap::arg!(--n <N>).value_parser(clap::value_parser!(usize)).allow_negative_numbers(true),
            )
        };
        for (value, expected) in
            [("-1", "a whole number from 0"), ("x", "a whole number"), ("", "a whole number")]
        {
            let error = command().try_get_matches_from(["c", "--n", value]).unwrap_err();
            let message = explained(&error.to_string());
            assert!(
                message.contains("--n") && message.contains(&format!("expected {expected}")),
                "{message}"
            );
        }
    }
}
