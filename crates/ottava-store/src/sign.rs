//! Signatures of requests: AWS Signature Version 4.

use crate::credentials::Credentials;
use crate::signed::Signed;
use ottava_common::hash::{hex, sha256};
use ottava_common::utc::Utc;
use ottava_http::Request;
use sha2::{Digest, Sha256};

/// The block of SHA-256 in bytes.
const BLOCK: usize = 64;

/// Adds the headers with the signature to `request`.
pub(crate) fn sign<'a>(credentials: &Credentials, signed: &Signed, mut request: Request<'a>) -> Request<'a> {
    for (name, value) in headers(credentials, signed) {
        // The client writes the host itself.
        if name != "host" {
            request = request.header(name, value);
        }
    }
    request.header("Authorization", authorization(credentials, signed))
}

/// Returns all headers that are signed, in order.
fn headers(credentials: &Credentials, signed: &Signed) -> Vec<(String, String)> {
    let mut headers: Vec<(String, String)> =
        signed.headers.iter().map(|(name, value)| (name.to_string(), value.clone())).collect();
    let origin = signed.url.origin();
    headers.push(("host".into(), origin[origin.find("://").map_or(0, |at| at + 3)..].to_string()));
    headers.push(("x-amz-content-sha256".into(), signed.payload.to_string()));
    headers.push(("x-amz-date".into(), stamp(signed.time)));
    headers.extend(credentials.token.clone().map(|token| ("x-amz-security-token".into(), token)));
    headers.sort();
    headers
}

fn authorization(credentials: &Credentials, signed: &Signed) -> String {
    let Credentials { id, secret, region, .. } = credentials;
    let (headers, stamp) = (headers(credentials, signed), stamp(signed.time));
    let names = headers.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(";");
    let lines: String = headers.iter().map(|(name, value)| format!("{name}:{}\n", value.trim())).collect();
    let rest = &signed.url.as_str()[signed.url.origin().len()..];
    let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
    let path = if path.is_empty() { "/" } else { path };
    let canonical = format!("{}\n{path}\n{query}\n{lines}\n{names}\n{}", signed.method, signed.payload);
    let date = &stamp[..8];
    let scope = format!("{date}/{region}/s3/aws4_request");
    let text = format!("AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{}", sha256(canonical.as_bytes()));
    let mut key = hmac(format!("AWS4{secret}").as_bytes(), date.as_bytes());
    for part in [region.as_str(), "s3", "aws4_request"] {
        key = hmac(&key, part.as_bytes());
    }
    let signature = hex(&hmac(&key, text.as_bytes()));
    format!("AWS4-HMAC-SHA256 Credential={id}/{scope},SignedHeaders={names},Signature={signature}")
}

/// Formats seconds since 1970 as `YYYYMMDDTHHMMSSZ`.
fn stamp(seconds: u64) -> String {
    let Utc { date: [year, month, day], time: [hour, minute, second] } = Utc::of(seconds);
    format!("{year:04}{month:02}{day:02}T{hour:02}{minute:02}{second:02}Z")
}

/// Returns the HMAC with SHA-256 (RFC 2104).
pub(crate) fn hmac(key: &[u8], message: &[u8]) -> Vec<u8> {
    let mut block = [0; BLOCK];
    match key.len() > BLOCK {
        true => block[..32].copy_from_slice(&Sha256::digest(key)),
        false => block[..key.len()].copy_from_slice(key),
    }
    let pad = |byte: u8| block.map(|of_key| of_key ^ byte);
    let inner = Sha256::new().chain_update(pad(0x36)).chain_update(message).finalize();
    Sha256::new().chain_update(pad(0x5c)).chain_update(inner).finalize().to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ottava_http::Url;

    #[test]
    fn codes_agree_with_rfc_4231() {
        let expected = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843";
        assert_eq!(hex(&hmac(b"Jefe", b"what do ya want for nothing?")), expected);
        let long = hmac(&[0xaa; 131], b"Test Using Larger Than Block-Size Key - Hash Key First");
        assert_eq!(hex(&long), "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
    }

    #[test]
    fn a_signature_agrees_with_the_documentation_of_amazon() {
        // "Signature calculations for the authorization header", example "GET object", 24 May 2013.
        let credentials = Credentials {
            id: "AKIAIOSFODNN7EXAMPLE".into(),
            secret: "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY".into(),
            token: None,
            region: "us-east-1".into(),
        };
        let signed = Signed {
            method: "GET",
            url: &Url::new("url", "https://examplebucket.s3.amazonaws.com/test.txt").unwrap(),
            payload: &sha256(b""),
            length: 0,
            headers: &[("range", "bytes=0-9".into())],
            time: 1_369_353_600,
        };
        let found = authorization(&credentials, &signed);
        assert!(found.contains("SignedHeaders=host;range;x-amz-content-sha256;x-amz-date,"), "{found}");
        assert!(found.ends_with("f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"), "{found}");
    }
}
