//! Authorization for Google Cloud Storage: HMAC keys, a token, or the file of an account.
//!
//! Google's store also reads requests of S3's protocol, with a token in the place of a signature. The file of a service account has an RSA key, which
//! signs a request for a token (RFC 7523). The file of a user has a token that refreshes others (RFC 6749, section 6).

use crate::base64::{decode, encode};
use crate::credentials::{Credentials, without};
use graviola::signing::rsa::SigningKey;
use ottava_common::{Error, Result, input};
use ottava_http::{Client, Fault, Request, Url, escape};
use serde::Deserialize;
use serde_json::json;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The server that issues tokens, unless the file of the account names another one.
const TOKENS: &str = "https://oauth2.googleapis.com/token";

/// What a token allows.
const SCOPE: &str = "https://www.googleapis.com/auth/devstorage.read_write";

/// The seconds for which a token is requested, and the seconds before its end from which another one is requested.
const LIFE: u64 = 3600;
const MARGIN: u64 = 300;

/// The maximum size of the file of an account and of an answer, in bytes.
const MAX_BYTES: u64 = 1 << 20;

const TIMEOUT: Duration = Duration::from_secs(30);

/// How requests are authorized.
#[derive(Clone)]
pub(crate) enum Google {
    /// HMAC keys, which sign as keys of S3 do.
    Keys(Credentials),
    /// Tokens.
    Tokens(TokenSource),
}

/// Issues tokens.
#[derive(Clone)]
pub(crate) enum TokenSource {
    /// A token that the user has got.
    Fixed(String),
    /// An account.
    Account(Arc<Issuer>),
}

/// An account, and its newest token.
pub(crate) struct Issuer {
    account: Account,
    client: Client,
    /// A token, and the time of its end in seconds since 1970.
    newest: Mutex<Option<(String, u64)>>,
}

/// The file of an account.
#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Account {
    ServiceAccount { client_email: String, private_key: String, token_uri: Option<String> },
    AuthorizedUser { client_id: String, client_secret: String, refresh_token: String },
}

/// The answer to a request for a token.
#[derive(Deserialize)]
struct Issued {
    access_token: String,
    expires_in: Option<u64>,
}

/// Reads the first of these: HMAC keys, a token, or the file of an account.
///
/// Errors with [`Error::Config`] if none is set, or if the file cannot be used.
pub(crate) fn access(variable: &dyn Fn(&str) -> Option<String>) -> Result<Google> {
    if variable("GS_ACCESS_KEY_ID").is_some() {
        let of_google = |name: &str| match name {
            "AWS_ACCESS_KEY_ID" => variable("GS_ACCESS_KEY_ID"),
            "AWS_SECRET_ACCESS_KEY" => variable("GS_SECRET_ACCESS_KEY"),
            "AWS_REGION" => Some("auto".to_string()),
            _ => None,
        };
        let keys = Credentials::new(&of_google).map_err(|_| {
            Error::Config("GS_ACCESS_KEY_ID or GS_SECRET_ACCESS_KEY is not set or cannot be sent; set both to an HMAC key of the bucket".into())
        })?;
        return Ok(Google::Keys(keys));
    }
    if let Some(token) = variable("GOOGLE_OAUTH_ACCESS_TOKEN") {
        return Ok(Google::Tokens(TokenSource::Fixed(token.trim().to_string())));
    }
    let path = variable("GOOGLE_APPLICATION_CREDENTIALS").ok_or_else(|| {
        Error::Config(
            "gs:// needs an account: set GOOGLE_APPLICATION_CREDENTIALS to its JSON file, GS_ACCESS_KEY_ID and GS_SECRET_ACCESS_KEY to an HMAC key, \
             or GOOGLE_OAUTH_ACCESS_TOKEN to a token"
                .into(),
        )
    })?;
    Ok(Google::Tokens(TokenSource::Account(Arc::new(Issuer::of_file(Path::new(&path))?))))
}

impl Google {
    /// Replaces keys in `text` by the names of their variables.
    pub(crate) fn redact(&self, text: &str) -> String {
        match self {
            Google::Keys(keys) => keys.redact(text).replace("$AWS_", "$GS_"),
            Google::Tokens(tokens) => tokens.redact(text),
        }
    }

    /// Returns what to change after a fault.
    pub(crate) fn remedy(&self, fault: &Fault) -> &'static str {
        match (self, fault.status) {
            (Google::Keys(_), Some(401 | 403)) => {
                "; check GS_ACCESS_KEY_ID, GS_SECRET_ACCESS_KEY and the rights of the account in the bucket"
            }
            (Google::Tokens(TokenSource::Fixed(_)), Some(401 | 403)) => {
                "; check GOOGLE_OAUTH_ACCESS_TOKEN, which may have ended, and the rights of the account in the bucket"
            }
            (Google::Tokens(_), Some(401 | 403)) => {
                "; check GOOGLE_APPLICATION_CREDENTIALS and the rights of the account in the bucket"
            }
            (_, Some(404)) => "; check the bucket",
            _ => "",
        }
    }
}

impl TokenSource {
    /// Returns a token that is valid at `time`, in seconds since 1970. Errors if the server does not issue one.
    pub(crate) fn token(&self, time: u64) -> Result<String, Fault> {
        match self {
            TokenSource::Fixed(token) => Ok(token.clone()),
            TokenSource::Account(issuer) => issuer.token(time),
        }
    }

    /// Replaces the token in `text` by the name of its variable.
    fn redact(&self, text: &str) -> String {
        match self {
            TokenSource::Fixed(token) => without(text, token, "$GOOGLE_OAUTH_ACCESS_TOKEN"),
            TokenSource::Account(issuer) => match &*issuer.newest.lock().unwrap_or_else(PoisonError::into_inner) {
                Some((token, _)) => without(text, token, "a token of $GOOGLE_APPLICATION_CREDENTIALS"),
                None => text.to_string(),
            },
        }
    }
}

impl Issuer {
    fn of_file(path: &Path) -> Result<Issuer> {
        let wrong = |why: String| {
            Error::Config(format!(
                "GOOGLE_APPLICATION_CREDENTIALS names {}: {why}; name the JSON file of a service account or of a user",
                path.display()
            ))
        };
        let text = input::read_text(path, MAX_BYTES).map_err(|error| wrong(error.to_string()))?;
        let account: Account = serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
        let uri = match &account {
            Account::ServiceAccount { private_key, token_uri, .. } => {
                key_of(private_key).ok_or_else(|| wrong("its `private_key` cannot be read".into()))?;
                token_uri.clone()
            }
            Account::AuthorizedUser { .. } => None,
        };
        let url = Url::new("token_uri", uri.as_deref().unwrap_or(TOKENS))?;
        Ok(Issuer { account, client: Client::new(url, None, MAX_BYTES)?, newest: Mutex::new(None) })
    }

    fn token(&self, time: u64) -> Result<String, Fault> {
        let mut newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((token, end)) = &*newest
            && time + MARGIN < *end
        {
            return Ok(token.clone());
        }
        let body = self.question(time)?;
        let request = Request::post(body.as_bytes()).header("Content-Type", "application/x-www-form-urlencoded");
        let answer = self.client.send(request, TIMEOUT)?.success()?.read()?;
        let Issued { access_token, expires_in } = serde_json::from_slice(&answer)
            .map_err(|error| Fault::lasting(format!("{} issued no token: {error}", self.client.url())))?;
        *newest = Some((access_token.clone(), time.saturating_add(expires_in.unwrap_or(LIFE))));
        Ok(access_token)
    }

    /// Returns the body of a request for a token.
    fn question(&self, time: u64) -> Result<String, Fault> {
        let escape = |text: &str| escape(text, "");
        match &self.account {
            Account::AuthorizedUser { client_id, client_secret, refresh_token } => Ok(format!(
                "grant_type=refresh_token&client_id={}&client_secret={}&refresh_token={}",
                escape(client_id),
                escape(client_secret),
                escape(refresh_token)
            )),
            Account::ServiceAccount { client_email, private_key, .. } => {
                let claims = json!({
                    "iss": client_email, "scope": SCOPE, "aud": self.client.url().as_str(), "iat": time, "exp": time + LIFE,
                });
                let part = |value: serde_json::Value| url_safe(value.to_string().as_bytes());
                let text = format!("{}.{}", part(json!({"alg": "RS256", "typ": "JWT"})), part(claims));
                let signature = key_of(private_key).and_then(|key| {
                    let mut bytes = vec![0; key.modulus_len_bytes()];
                    Some(url_safe(key.sign_pkcs1_sha256(&mut bytes, text.as_bytes()).ok()?))
                });
                let signature = signature.ok_or_else(|| {
                    Fault::lasting(format!("the key of {client_email} cannot sign; make a new key of the account"))
                })?;
                let kind = escape("urn:ietf:params:oauth:grant-type:jwt-bearer");
                Ok(format!("grant_type={kind}&assertion={text}.{signature}"))
            }
        }
    }
}

/// Encodes bytes in the alphabet of addresses (RFC 4648, section 5), without padding.
fn url_safe(bytes: &[u8]) -> String {
    encode(bytes).trim_end_matches('=').replace('+', "-").replace('/', "_")
}

/// Reads a private key in PEM (PKCS #8). Returns `None` for another text, or if the processor lacks instructions of the library.
fn key_of(pem: &str) -> Option<SigningKey> {
    let text = pem.split("-----BEGIN PRIVATE KEY-----").nth(1)?.split("-----END").next()?;
    let bytes = decode(&text.split_whitespace().collect::<String>())?;
    graviola::util::is_cpu_supported().then(|| SigningKey::from_pkcs8_der(&bytes).ok())?
}

#[cfg(test)]
mod tests {
    use super::*;
    use graviola::signing::rsa::{KeySize, VerifyingKey};
    use ottava_http::testing::{Server, reply};

    /// Returns a key, and its text in the file of an account.
    fn key() -> (VerifyingKey, String) {
        let key = SigningKey::generate(KeySize::Rsa2048).unwrap();
        let mut bytes = vec![0; 4096];
        let text = encode(key.to_pkcs8_der(&mut bytes).unwrap());
        (key.public_key(), format!("-----BEGIN PRIVATE KEY-----\n{text}\n-----END PRIVATE KEY-----\n"))
    }

    #[test]
    fn the_key_of_an_account_signs_requests_for_tokens() {
        let server =
            Server::start(|_, _| reply(200, "", r#"{"access_token": "token-of-an-hour", "expires_in": 3600}"#));
        let ((public, private), folder) = (key(), tempfile::tempdir().unwrap());
        let path = folder.path().join("account.json");
        let url = server.url("/token");
        let file =
            json!({"type": "service_account", "client_email": "otter@x", "private_key": private, "token_uri": url});
        std::fs::write(&path, file.to_string()).unwrap();
        let named = |name: &str| (name == "GOOGLE_APPLICATION_CREDENTIALS").then(|| path.display().to_string());
        let Google::Tokens(tokens) = access(&named).unwrap() else { panic!("an account issues tokens") };
        for (time, questions) in [(1000, 1), (2000, 1), (4299, 1), (4300, 2)] {
            assert_eq!(tokens.token(time).unwrap(), "token-of-an-hour");
            assert_eq!(server.received().len(), questions, "at {time}");
        }
        let body = &server.received()[0].body;
        let (text, signature) = body.split_once("&assertion=").unwrap().1.rsplit_once('.').unwrap();
        let bytes = decode(&signature.replace('-', "+").replace('_', "/")).unwrap();
        public.verify_pkcs1_sha256(&bytes, text.as_bytes()).unwrap();
        let claims = decode(text.split_once('.').unwrap().1).unwrap();
        let claims: serde_json::Value = serde_json::from_slice(&claims).unwrap();
        assert_eq!((&claims["iss"], &claims["aud"], &claims["exp"]), (&json!("otter@x"), &json!(url), &json!(4600)));
        assert!(!tokens.redact("said token-of-an-hour").contains("token-of-an-hour"));
        std::fs::write(
            &path,
            json!({"type": "service_account", "client_email": "x", "private_key": "none"}).to_string(),
        )
        .unwrap();
        let error = access(&named).err().unwrap().to_string();
        assert!(error.contains("its `private_key` cannot be read"), "{error}");
    }
}
