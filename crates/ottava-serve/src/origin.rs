//! Cross-origin resource sharing (the Fetch standard, <https://fetch.spec.whatwg.org/#http-cors-protocol>): decides which pages of other sites may
//! send requests and read the answers.

use crate::stranger::text_of;
use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header};
use ottava_common::Error;
use std::str::FromStr;

/// The methods that any path of the server accepts.
const METHODS: HeaderValue = HeaderValue::from_static("GET, POST, DELETE, OPTIONS");
/// The seconds for which a browser remembers a preflight.
const MAX_AGE: HeaderValue = HeaderValue::from_static("600");

/// A site whose pages may send requests: `scheme://host` or `scheme://host:port`, or `*` for all sites.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin(String);

impl FromStr for Origin {
    type Err = Error;
    fn from_str(text: &str) -> Result<Origin, Error> {
        let is_site = |site: &str| !site.is_empty() && !site.contains(['/', '?', '#', ' ', '*', ',']);
        match text.split_once("://") {
            Some(("http" | "https", site)) if is_site(site) => Ok(Origin(text.to_ascii_lowercase())),
            None if text == "*" => Ok(Origin(text.into())),
            _ => Err(Error::Config(format!(
                "`{text}` is no origin; write it as browsers send it, such as https://chat.example.org:8443, or * for all"
            ))),
        }
    }
}

/// Returns the `Origin` of a request if pages of this origin may send requests.
pub fn allowed<'a>(origins: &[Origin], headers: &'a HeaderMap) -> Option<&'a HeaderValue> {
    let origin = text_of(headers, header::ORIGIN)?;
    let is_it = |Origin(allowed): &Origin| allowed == "*" || allowed.eq_ignore_ascii_case(origin);
    headers.get(header::ORIGIN).filter(|_| origins.iter().any(is_it))
}

/// Answers a preflight from an allowed origin. In a preflight, a browser asks whether a page may send a request; it does not send a key.
pub fn preflight<B>(origins: &[Origin], request: &Request<B>) -> Option<Response<Body>> {
    let headers = request.headers();
    let asked = request.method() == Method::OPTIONS && headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    allowed(origins, headers).filter(|_| asked)?;
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    let answer = response.headers_mut();
    answer.insert(header::ACCESS_CONTROL_ALLOW_METHODS, METHODS);
    answer.insert(header::ACCESS_CONTROL_MAX_AGE, MAX_AGE);
    // Clients may send any headers, because only headers that the server checks change an answer.
    if let Some(names) = headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
        answer.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, names.clone());
    }
    Some(response)
}

/// Allows the page that sent a request to read the answer.
pub fn share(origin: Option<HeaderValue>, response: &mut Response<Body>) {
    if let Some(origin) = origin {
        response.headers_mut().insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        response.headers_mut().append(header::VARY, HeaderValue::from_static("Origin"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_are_those_that_browsers_send() {
        for right in ["*", "https://a.example", "http://localhost:3000", "http://[::1]:80"] {
            right.parse::<Origin>().unwrap();
        }
        for wrong in ["", "a.example", "https://", "https://a.example/", "ftp://a", "https://*.example", "null"] {
            let error = wrong.parse::<Origin>().unwrap_err().to_string();
            assert!(error.contains("is no origin"), "{error}");
        }
    }
}
