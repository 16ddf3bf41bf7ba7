//! The keys of servers, which are only in the environment.

use ottava_common::{Error, Result};
use std::{env, fmt};

/// The usual scheme of keys.
const BEARER: &str = "Bearer";

/// The usual header of keys.
const AUTHORIZATION: &str = "Authorization";

/// A key, which is sent as `Authorization: Bearer KEY`, with another scheme than `Bearer`, or alone in another header. [`fmt::Debug`] prints the name of its variable and not the key.
#[derive(Clone)]
pub struct Secret {
    variable: String,
    scheme: &'static str,
    /// The name of the header that has the key.
    header: &'static str,
    value: String,
}

impl Secret {
    /// Reads the key from the environment variable `variable`, which the setting `setting` names. Errors with [`Error::Config`] if the variable is
    /// unset, empty or not text, or if `variable` is not a name in capitals. In the last case, the error does not quote `variable`, because it may be
    /// the key itself.
    pub fn from_env(setting: &str, variable: &str) -> Result<Secret> {
        let is_name = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
        if variable.is_empty() || variable.starts_with(|c: char| c.is_ascii_digit()) || !variable.chars().all(is_name) {
            let what = "is the name of an environment variable: capitals, digits and underscores";
            return Err(Error::Config(format!("`{setting}` {what}. Write no key into settings")));
        }
        Secret::from_text(variable, &env::var(variable).unwrap_or_default()).ok_or_else(|| {
            let why = "which is unset, empty or contains spaces or other characters that cannot be printed";
            Error::Config(format!("`{setting}` names the environment variable {variable}, {why}"))
        })
    }

    /// Creates a key with the `value` that was read from `place`, a variable or a file. Returns `None` if the value is empty or cannot be sent.
    pub fn from_text(place: &str, value: &str) -> Option<Secret> {
        let value = value.trim().to_string();
        let is_sendable = !value.is_empty() && value.chars().all(|c| c.is_ascii_graphic());
        is_sendable.then(|| Secret { variable: place.to_string(), scheme: BEARER, header: AUTHORIZATION, value })
    }

    /// Returns the key with another scheme, such as `Basic`.
    pub fn with_scheme(self, scheme: &'static str) -> Secret {
        Secret { scheme, ..self }
    }

    /// Returns the key for another header than `Authorization`, which has the key without a scheme.
    pub fn with_header(self, header: &'static str) -> Secret {
        Secret { header, ..self }
    }

    /// Returns the name of the variable or file that has the key.
    pub fn place(&self) -> &str {
        &self.variable
    }

    /// Returns the name and the value of the header that has the key.
    pub(crate) fn header(&self) -> (&'static str, String) {
        match self.header {
            AUTHORIZATION => (AUTHORIZATION, format!("{} {}", self.scheme, self.value)),
            header => (header, self.value.clone()),
        }
    }

    /// Replaces the key in `text` by the name of its variable, because servers may repeat the key in their answers.
    pub(crate) fn redact(&self, text: &str) -> String {
        text.replace(&self.value, &format!("${}", self.variable))
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "${}", self.variable)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_no_name_and_is_not_repeated() {
        let error = Secret::from_env("api_key_env", "sk-1234abcd").unwrap_err().to_string();
        assert!(error.contains("Write no key into settings") && !error.contains("1234"), "{error}");
        let error = Secret::from_env("api_key_env", "OTTAVA_NO_SUCH_KEY").unwrap_err().to_string();
        assert!(error.contains("OTTAVA_NO_SUCH_KEY"), "{error}");
    }

    #[test]
    fn a_key_is_neither_printed_nor_repeated() {
        let secret =
            Secret { variable: "JUDGE_KEY".into(), scheme: BEARER, header: AUTHORIZATION, value: "hunter2".into() };
        assert_eq!(format!("{secret:?}"), "$JUDGE_KEY");
        assert_eq!(secret.redact("bad key hunter2."), "bad key $JUDGE_KEY.");
        assert_eq!(secret.header(), ("Authorization", "Bearer hunter2".to_string()));
        assert_eq!(secret.with_header("X-Key").header(), ("X-Key", "hunter2".to_string()));
    }
}
