//! Blobs of Azure: keys, signatures, and files in blocks.

use crate::base64::{decode, encode};
use crate::credentials::without;
use crate::sign::hmac;
use crate::signed::Signed;
use ottava_common::utc::Utc;
use ottava_common::{Error, Result};
use ottava_http::{Fault, Request, Url, unescape};

/// The version of the protocol.
const VERSION: &str = "2021-12-02";

/// The account of the emulator Azurite, and its public key.
const EMULATOR: (&str, &str) =
    ("devstoreaccount1", "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==");

/// The variable with a connection string.
const CONNECTION: &str = "AZURE_STORAGE_CONNECTION_STRING";

/// How requests are authorized.
#[derive(Clone)]
pub(crate) enum Azure {
    /// Signatures with the key of the account.
    Key(SharedKey),
    /// A shared access signature: parameters that are added to each address.
    Parameters(String),
}

/// An account and its key.
#[derive(Clone)]
pub(crate) struct SharedKey {
    account: String,
    key: Vec<u8>,
}

/// Reads account, key or shared access signature, and address from a connection string, or from other variables if there is none. Returns them with the
/// address of the container.
///
/// Errors with [`Error::Config`] if they are missing or cannot be used.
pub(crate) fn access(container: &str, variable: &dyn Fn(&str) -> Option<String>) -> Result<(Azure, Url)> {
    let connection = variable(CONNECTION);
    let field = |name: &str| {
        let fields = connection.as_deref().unwrap_or_default().split(';').filter_map(|field| field.split_once('='));
        fields.filter(|(known, _)| *known == name).map(|(_, value)| value.to_string()).next()
    };
    let emulator = (field("UseDevelopmentStorage").as_deref() == Some("true")).then_some(EMULATOR);
    let of = |of_field: &str, variables: &[&str]| {
        let found = match connection {
            Some(_) => field(of_field),
            None => variables.iter().find_map(|name| variable(name)),
        };
        found.map(|text| text.trim().to_string()).filter(|text| !text.is_empty())
    };
    let missing = |what: &str| Error::Config(format!("az://{container}: {what}"));
    let account = of("AccountName", &["AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_ACCOUNT_NAME"])
        .or(emulator.map(|(account, _)| account.to_string()));
    let named = || {
        account.clone().ok_or_else(|| match connection {
            Some(_) => missing("AZURE_STORAGE_CONNECTION_STRING has no `AccountName`"),
            None => missing("set AZURE_STORAGE_ACCOUNT to the account, or AZURE_STORAGE_CONNECTION_STRING"),
        })
    };
    let key = of("AccountKey", &["AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCOUNT_KEY"])
        .or(emulator.map(|(_, key)| key.to_string()));
    let access = match (key, of("SharedAccessSignature", &["AZURE_STORAGE_SAS_TOKEN"])) {
        (Some(key), _) => {
            let key = decode(&key).ok_or_else(|| {
                let place =
                    if connection.is_some() { "`AccountKey` of the connection string" } else { "AZURE_STORAGE_KEY" };
                missing(&format!("{place} is not the base64 text of a key"))
            })?;
            Azure::Key(SharedKey { account: named()?, key })
        }
        (None, Some(token)) => Azure::Parameters(token.trim_start_matches('?').to_string()),
        (None, None) if connection.is_some() => {
            return Err(missing(
                "AZURE_STORAGE_CONNECTION_STRING has neither `AccountKey` nor `SharedAccessSignature`",
            ));
        }
        (None, None) => {
            named()?;
            return Err(missing("set AZURE_STORAGE_KEY to the key of the account, or AZURE_STORAGE_SAS_TOKEN"));
        }
    };
    let given = of("BlobEndpoint", &["AZURE_STORAGE_ENDPOINT"])
        .or(emulator.map(|(account, _)| format!("http://127.0.0.1:10000/{account}")));
    let endpoint = match given {
        Some(endpoint) => endpoint,
        None => {
            let scheme = of("DefaultEndpointsProtocol", &[]).unwrap_or_else(|| "https".into());
            let suffix = of("EndpointSuffix", &[]).unwrap_or_else(|| "core.windows.net".into());
            format!("{scheme}://{}.blob.{suffix}", named()?)
        }
    };
    Ok((access, Url::new("AZURE_STORAGE_ENDPOINT", endpoint.trim_end_matches('/'))?.join(container)))
}

impl Azure {
    /// Returns the parameters that are added to each address.
    pub(crate) fn parameters(&self) -> &str {
        match self {
            Azure::Key(_) => "",
            Azure::Parameters(parameters) => parameters,
        }
    }

    /// Adds the headers of the protocol and, with a key, the signature to `request`.
    pub(crate) fn authorize<'a>(&self, signed: &Signed, request: Request<'a>) -> Request<'a> {
        let headers = headers(signed);
        let request = headers.into_iter().fold(request, |request, (name, value)| request.header(name, value));
        match self {
            Azure::Key(key) => request.header("Authorization", key.authorization(signed)),
            Azure::Parameters(_) => request,
        }
    }

    /// Replaces the shared access signature in `text` by the name of its variable.
    pub(crate) fn redact(&self, text: &str) -> String {
        let signature = self.parameters().split('&').find_map(|part| part.strip_prefix("sig=")).unwrap_or_default();
        without(text, signature, "$AZURE_STORAGE_SAS_TOKEN")
    }
}

/// Returns what to change after a fault.
pub(crate) fn remedy(fault: &Fault) -> &'static str {
    match fault.status {
        Some(401 | 403) => {
            "; check AZURE_STORAGE_CONNECTION_STRING, or else AZURE_STORAGE_ACCOUNT, AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN, and the clock of this machine"
        }
        Some(404) => "; check the account and the container, which must exist",
        _ => "",
    }
}

/// Returns the headers of a request, in the order of their names.
fn headers(signed: &Signed) -> Vec<(&'static str, String)> {
    let is_whole = signed.method == "PUT" && !signed.url.as_str().contains("comp=block");
    let kind = is_whole.then(|| ("x-ms-blob-type", "BlockBlob".to_string()));
    kind.into_iter().chain([("x-ms-date", date(signed.time)), ("x-ms-version", VERSION.to_string())]).collect()
}

impl SharedKey {
    /// Returns the header with the signature.
    fn authorization(&self, signed: &Signed) -> String {
        format!("SharedKey {}:{}", self.account, self.signature(signed))
    }

    /// Returns the signature ("Authorize with Shared Key", documentation of Azure Storage, version 2015-02-21 and later).
    fn signature(&self, signed: &Signed) -> String {
        let length = if signed.length == 0 { String::new() } else { signed.length.to_string() };
        let headers: String = headers(signed).iter().map(|(name, value)| format!("{name}:{value}\n")).collect();
        let rest = &signed.url.as_str()[signed.url.origin().len()..];
        let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
        let parameters = query.split('&').filter_map(|part| part.split_once('='));
        let mut parameters: Vec<_> =
            parameters.map(|(name, value)| format!("\n{}:{}", name.to_lowercase(), unescape(value))).collect();
        parameters.sort();
        // Content-Encoding, Content-Language, Content-Length, Content-MD5, Content-Type, Date, four conditions and Range.
        let text = format!(
            "{}\n\n\n{length}\n\n\n\n\n\n\n\n\n{headers}/{}{path}{}",
            signed.method,
            self.account,
            parameters.concat()
        );
        encode(&hmac(&self.key, text.as_bytes()))
    }
}

/// Returns the id of block `number`. The ids of a blob have equal lengths.
pub(crate) fn block_id(number: u64) -> String {
    encode(format!("{number:08}").as_bytes())
}

/// Returns the body that makes a blob of these blocks.
pub(crate) fn block_list(ids: &[String]) -> String {
    let blocks: String = ids.iter().map(|id| format!("<Latest>{id}</Latest>")).collect();
    format!("<?xml version=\"1.0\" encoding=\"utf-8\"?><BlockList>{blocks}</BlockList>")
}

/// Formats seconds since 1970 as a date of HTTP, such as `Fri, 24 May 2013 00:00:00 GMT`.
fn date(seconds: u64) -> String {
    const DAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];
    const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let Utc { date: [year, month, day], time: [hour, minute, second] } = Utc::of(seconds);
    let (of_week, month) = (DAYS[(seconds / 86_400 % 7) as usize], MONTHS[month as usize - 1]);
    format!("{of_week}, {day:02} {month} {year:04} {hour:02}:{minute:02}:{second:02} GMT")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_http() {
        assert_eq!(date(1_369_353_600), "Fri, 24 May 2013 00:00:00 GMT");
        assert_eq!(date(0), "Thu, 01 Jan 1970 00:00:00 GMT");
    }

    #[test]
    fn the_emulator_and_connection_strings_are_read() {
        let open =
            |text: &str| access("runs", &|name| (name == "AZURE_STORAGE_CONNECTION_STRING").then(|| text.to_string()));
        let (_, url) = open("UseDevelopmentStorage=true").unwrap();
        assert_eq!(url.as_str(), "http://127.0.0.1:10000/devstoreaccount1/runs");
        let text = "DefaultEndpointsProtocol=https;AccountName=otter;AccountKey=a2V5;EndpointSuffix=core.windows.net";
        let (access, url) = open(text).unwrap();
        assert_eq!(url.as_str(), "https://otter.blob.core.windows.net/runs");
        assert!(matches!(access, Azure::Key(SharedKey { account, key }) if account == "otter" && key == b"key"));
    }

    #[test]
    fn a_connection_string_is_read_alone() {
        let open = |text: &str| {
            super::access("runs", &|name| match name {
                CONNECTION => Some(text.to_string()),
                "AZURE_STORAGE_ENDPOINT" => Some("https://elsewhere".into()),
                "AZURE_STORAGE_KEY" => Some("b3RoZXI=".into()),
                _ => None,
            })
        };
        let (access, url) = open("AccountName=otter;AccountKey=a2V5;EndpointSuffix=core.chinacloudapi.cn").unwrap();
        assert_eq!(url.as_str(), "https://otter.blob.core.chinacloudapi.cn/runs");
        assert!(matches!(access, Azure::Key(SharedKey { key, .. }) if key == b"key"));
        // A signature for an endpoint needs no account.
        let (access, url) = open("BlobEndpoint=https://otter.example/;SharedAccessSignature=?sv=1&sig=a").unwrap();
        assert_eq!((access.parameters(), url.as_str()), ("sv=1&sig=a", "https://otter.example/runs"));
        let error = open("AccountName=otter").err().unwrap().to_string();
        assert!(error.contains("CONNECTION_STRING has neither"), "{error}");
        let error = open("AccountKey=a2V5").err().unwrap().to_string();
        assert!(error.contains("CONNECTION_STRING has no `AccountName`"), "{error}");
    }
}
