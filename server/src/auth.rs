//! Bearer keys.

use axum::extract::{Request, State};
use axum::http::header;
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use subtle::{Choice, ConstantTimeEq as _};

use crate::error::ApiError;
use crate::state::AppState;

/// Checks the bearer key where keys are set. The scheme word is case-insensitive, the key is not.
pub async fn authorize(State(state): State<AppState>, request: Request, next: Next) -> Response {
    let keys = &state.config().api_keys;
    if !keys.is_empty() {
        let given = request.headers().get(header::AUTHORIZATION).and_then(|value| bearer(value.as_bytes()));
        if !given.is_some_and(|given| is_one_of(given, keys)) {
            return ApiError::unauthorized().into_response();
        }
    }
    next.run(request).await
}

/// Looks at every key to the end, whichever fits.
fn is_one_of(given: &[u8], keys: &[String]) -> bool {
    keys.iter().fold(Choice::from(0), |found, key| found | given.ct_eq(key.as_bytes())).into()
}

fn bearer(value: &[u8]) -> Option<&[u8]> {
    const SCHEME: &[u8] = b"bearer ";
    let (scheme, key) = value.split_at_checked(SCHEME.len())?;
    scheme.eq_ignore_ascii_case(SCHEME).then(|| key.trim_ascii_start())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scheme_word_may_be_in_any_case_and_the_key_may_not() {
        assert_eq!(bearer(b"Bearer AbC"), Some(&b"AbC"[..]));
        assert_eq!(bearer(b"bEARER  AbC"), Some(&b"AbC"[..]));
        assert_eq!(bearer(b"Basic AbC"), None);
        assert_eq!(bearer(b"Bearer"), None);
        assert_ne!(bearer(b"Bearer abc"), Some(&b"AbC"[..]));
    }

    #[test]
    fn any_of_the_keys_fits_and_nothing_else() {
        let keys = ["one".to_owned(), "AbC".to_owned()];
        assert!(is_one_of(b"one", &keys) && is_one_of(b"AbC", &keys));
        for wrong in [&b"abc"[..], b"", b"on", b"one1", b"oneAbC"] {
            assert!(!is_one_of(wrong, &keys));
        }
    }
}
