//! How requests to a store are authorized, and what differs between the protocols of stores.

use crate::azure::{self, Azure};
use crate::credentials::{Credentials, address};
use crate::google::{self, Google};
use crate::place::Scheme;
use crate::signed::Signed;
use crate::{sign, xml};
use ottava_common::Result;
use ottava_http::{Fault, Request, Url};

/// The address of Google Cloud Storage.
const GOOGLE: &str = "https://storage.googleapis.com";

/// How requests are authorized.
#[derive(Clone)]
pub(crate) enum Access {
    /// Signatures of S3.
    Keys(Credentials),
    /// HMAC keys or tokens of Google Cloud Storage, which reads the requests of S3's protocol.
    Google(Google),
    /// Keys or shared access signatures of Azure.
    Azure(Azure),
}

/// The form of a listing of objects.
pub(crate) struct Listing {
    /// Returns the query of the page after a token, for names with this prefix. Both are escaped.
    pub(crate) query: fn(&str, Option<String>) -> String,
    /// The element of an object, and the elements in it.
    pub(crate) object: &'static str,
    pub(crate) name: &'static str,
    pub(crate) size: &'static str,
    pub(crate) etag: &'static str,
    /// The element with the token of the next page.
    pub(crate) next: &'static str,
}

/// Listings of S3 and of Google Cloud Storage. The parameters of a signed address are sorted.
const OF_S3: Listing = Listing {
    query: |prefix, token| {
        let next = token.map_or(String::new(), |token| format!("continuation-token={token}&"));
        format!("{next}list-type=2&prefix={prefix}")
    },
    object: "<Contents>",
    name: "Key",
    size: "Size",
    etag: "ETag",
    next: "NextContinuationToken",
};

/// Listings of Azure.
const OF_AZURE: Listing = Listing {
    query: |prefix, token| {
        let next = token.map_or(String::new(), |token| format!("&marker={token}"));
        format!("comp=list{next}&prefix={prefix}&restype=container")
    },
    object: "<Blob>",
    name: "Name",
    size: "Content-Length",
    etag: "Etag",
    next: "NextMarker",
};

impl Access {
    /// Reads keys or tokens from variables, and returns them with the address of `bucket`, without a slash at the end.
    ///
    /// Errors with [`Error::Config`](ottava_common::Error::Config) if they are missing or cannot be used.
    pub(crate) fn new(
        scheme: Scheme,
        bucket: &str,
        variable: &dyn Fn(&str) -> Option<String>,
    ) -> Result<(Access, Url)> {
        match scheme {
            Scheme::S3 => {
                let keys = Credentials::new(variable)?;
                let url = address(bucket, &keys.region, variable)?;
                Ok((Access::Keys(keys), url))
            }
            Scheme::Google => {
                let endpoint = variable("STORAGE_EMULATOR_HOST").unwrap_or_else(|| GOOGLE.into());
                let url = Url::new("STORAGE_EMULATOR_HOST", endpoint.trim_end_matches('/'))?.join(bucket);
                Ok((Access::Google(google::access(variable)?), url))
            }
            Scheme::Azure => azure::access(bucket, variable).map(|(access, url)| (Access::Azure(access), url)),
        }
    }

    /// Whether the store has the protocol of Azure.
    pub(crate) fn is_azure(&self) -> bool {
        matches!(self, Access::Azure(_))
    }

    /// Returns the form of listings.
    pub(crate) fn listing(&self) -> &'static Listing {
        if self.is_azure() { &OF_AZURE } else { &OF_S3 }
    }

    /// Returns the parameters that are added to each address.
    pub(crate) fn parameters(&self) -> &str {
        match self {
            Access::Azure(azure) => azure.parameters(),
            _ => "",
        }
    }

    /// Adds the headers that authorize `request`. Errors if a token cannot be fetched.
    pub(crate) fn authorize<'a>(&self, signed: &Signed, request: Request<'a>) -> Result<Request<'a>, Fault> {
        match self {
            Access::Keys(keys) | Access::Google(Google::Keys(keys)) => Ok(sign::sign(keys, signed, request)),
            Access::Google(Google::Tokens(tokens)) => {
                Ok(request.header("Authorization", format!("Bearer {}", tokens.token(signed.time)?)))
            }
            Access::Azure(azure) => Ok(azure.authorize(signed, request)),
        }
    }

    /// Replaces keys in `text` by the names of their variables, because stores may repeat keys in their answers.
    pub(crate) fn redact(&self, text: &str) -> String {
        match self {
            Access::Keys(keys) => keys.redact(text),
            Access::Google(google) => google.redact(text),
            Access::Azure(azure) => azure.redact(text),
        }
    }

    /// Returns what to change after a fault.
    pub(crate) fn remedy(&self, fault: &Fault) -> &'static str {
        match self {
            Access::Keys(_) => remedy(fault),
            Access::Google(google) => google.remedy(fault),
            Access::Azure(_) => azure::remedy(fault),
        }
    }
}

/// Returns what to change after a fault of a store with keys, by the code in the answer of the store, or else by the status.
fn remedy(fault: &Fault) -> &'static str {
    let keys = "; check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and the rights of the account";
    match (xml::text(&fault.words, "Code").unwrap_or_default().as_str(), fault.status) {
        ("ExpiredToken" | "InvalidToken" | "TokenRefreshRequired", _) => {
            "; the temporary keys are not valid any more: start again with new AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and \
             AWS_SESSION_TOKEN"
        }
        ("RequestTimeTooSkewed", _) => "; set the clock of this machine",
        ("AccessDenied", _) => "; check the rights of the account, and AWS_ACCESS_KEY_ID",
        ("NoSuchBucket", _) => "; check the bucket",
        (_, Some(401 | 403)) => keys,
        (_, Some(301 | 307 | 400)) => "; check AWS_REGION, which must be the region of the bucket",
        (_, Some(404)) => "; check the bucket",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_remedy_follows_from_the_code_of_the_store() {
        let fault = |status, code: &str| Fault {
            status: Some(status),
            ..Fault::lasting(format!("status {status}: <Error><Code>{code}</Code></Error>"))
        };
        for (status, code, word) in [
            (400, "ExpiredToken", "AWS_SESSION_TOKEN"),
            (403, "InvalidToken", "AWS_SESSION_TOKEN"),
            (403, "AccessDenied", "rights"),
            (403, "RequestTimeTooSkewed", "clock"),
            (403, "SignatureDoesNotMatch", "AWS_SECRET_ACCESS_KEY"),
            (400, "AuthorizationHeaderMalformed", "AWS_REGION"),
            (404, "NoSuchBucket", "bucket"),
        ] {
            let found = remedy(&fault(status, code));
            assert!(found.contains(word), "{code}: {found}");
        }
        assert_eq!(remedy(&Fault::passing("the host cannot be reached")), "");
    }
}
