//! The addresses of servers in settings.

use ottava_common::{Error, Result};
use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};

/// The address of a server, or of a page of the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Url {
    text: String,
    host: String,
}

impl Url {
    /// Reads the address `text` of the setting `setting`. Errors with [`Error::Config`] unless it begins with `https://` or `http://` and names a
    /// host. Also errors if it has a user name, spaces or a fragment (`#`).
    pub fn new(setting: &str, text: &str) -> Result<Url> {
        let refuse = |why: &str| Err(Error::Config(format!("`{setting}` {why}")));
        // An address may have a password, so no message quotes it: messages reach logs.
        let Some((scheme, rest)) = text.split_once("://") else {
            return refuse("is no address; write it with its scheme, as in https://example.org/score");
        };
        if !["https", "http"].contains(&scheme) {
            return refuse("has another scheme than https and http");
        }
        if text.contains(|c: char| c.is_whitespace() || c.is_control() || c == '#') {
            return refuse("contains a space, a control character or `#`");
        }
        let authority = rest.split(['/', '?']).next().unwrap_or_default();
        if authority.contains('@') {
            return refuse("contains a user name or a password; name an environment variable in `api_key_env` instead");
        }
        match host(authority) {
            "" => refuse("names no host"),
            host => Ok(Url { text: text.to_string(), host: host.to_ascii_lowercase() }),
        }
    }

    /// Returns the address of the page `path` of this server: `https://host/v1` with `chat/completions` is `https://host/v1/chat/completions`.
    pub fn join(&self, path: &str) -> Url {
        Url { text: format!("{}/{path}", self.text.trim_end_matches('/')), host: self.host.clone() }
    }

    /// Returns the address of the redirect `location`, which is absolute or a path of this server.
    ///
    /// Has the errors of [`Url::new`].
    pub fn redirect(&self, location: &str) -> Result<Url> {
        match location.strip_prefix('/').filter(|rest| !rest.starts_with('/')) {
            Some(_) => Url::new("Location", &format!("{}{location}", self.origin())),
            None => Url::new("Location", location),
        }
    }

    /// Returns scheme, host and port, such as `https://example.org` or `http://localhost:80`.
    pub fn origin(&self) -> &str {
        let scheme = self.text.find("://").map_or(0, |at| at + 3);
        let end = self.text[scheme..].find(['/', '?']).map_or(self.text.len(), |at| scheme + at);
        &self.text[..end]
    }

    /// Returns the address as text.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Whether the connection is encrypted.
    pub fn is_https(&self) -> bool {
        self.text.starts_with("https://")
    }

    /// Whether the server is on this machine.
    pub fn is_loopback(&self) -> bool {
        let is_v4 = self.host.parse().is_ok_and(|address: Ipv4Addr| address.is_loopback());
        let is_v6 = self.host.parse().is_ok_and(|address: Ipv6Addr| address.is_loopback());
        self.host == "localhost" || is_v4 || is_v6
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        // A query may have a key, so it is omitted.
        f.write_str(self.text.split('?').next().unwrap_or_default())
    }
}

/// Returns the host of `host:port`, of `[address]:port`, or of a host without a port.
fn host(authority: &str) -> &str {
    match authority.strip_prefix('[') {
        Some(address) => address.split(']').next().unwrap_or_default(),
        None => authority.split(':').next().unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_bad_ones_are_refused() {
        for (text, https, loopback) in [
            ("https://example.org", true, false),
            ("http://localhost:8000/v1", false, true),
            ("http://127.3.2.1/score?key=1", false, true),
            ("http://[::1]:80/", false, true),
            ("http://10.0.0.1", false, false),
            ("https://localhost.example.org", true, false),
        ] {
            let url = Url::new("url", text).unwrap();
            assert_eq!((url.is_https(), url.is_loopback()), (https, loopback), "{text}");
        }
        for text in [
            "example.org",
            "ftp://example.org",
            "file:///etc",
            "https://",
            "https:///path",
            "https://a b",
            "https://a/#b",
        ] {
            assert!(matches!(Url::new("url", text), Err(Error::Config(_))), "{text}");
        }
    }

    #[test]
    fn no_message_has_a_password_or_a_query() {
        let error = Url::new("url", "https://user:hunter2@example.org").unwrap_err().to_string();
        assert!(error.contains("api_key_env") && !error.contains("hunter2"), "{error}");
        assert_eq!(Url::new("url", "https://a/b?key=hunter2").unwrap().to_string(), "https://a/b");
        assert_eq!(Url::new("url", "https://a/v1/").unwrap().join("chat").as_str(), "https://a/v1/chat");
    }

    #[test]
    fn redirects_are_absolute_or_paths_of_the_same_server() {
        let url = Url::new("url", "https://a:80/v1/file?x=1").unwrap();
        assert_eq!(url.origin(), "https://a:80");
        assert_eq!(url.redirect("/other?y=2").unwrap().as_str(), "https://a:80/other?y=2");
        assert_eq!(url.redirect("http://b/x").unwrap().origin(), "http://b");
        // Neither a scheme-less host nor a relative path is followed.
        assert!(url.redirect("//b/x").is_err() && url.redirect("x").is_err());
    }
}
