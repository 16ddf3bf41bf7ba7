//! Addresses of servers in texts of settings.

/// The schemes of addresses of servers and stores.
pub const SCHEMES: [&str; 5] = ["http://", "https://", "s3://", "gs://", "az://"];

/// The characters that end an address in a text.
const ENDS: &[char] = &[' ', '\t', '\n', '"', '\'', '\\', '<', '>', '|'];

/// Returns `text` without the queries of the addresses in it, which may have keys.
pub fn without_queries(text: &str) -> String {
    let (mut kept, mut rest) = (String::new(), text);
    while let Some(start) = SCHEMES.iter().filter_map(|scheme| rest.find(scheme)).min() {
        let end = rest[start..].find(ENDS).map_or(rest.len(), |at| start + at);
        let address = &rest[start..end];
        kept += &rest[..start];
        kept += address.split(['?', '#']).next().unwrap_or_default();
        rest = &rest[end..];
    }
    kept + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_of_addresses_are_left_out() {
        let text = r#"["https://a/b.jsonl?sig=1,2", "az://c/d?x", "why?"] 'http://e?key=1' f"#;
        assert_eq!(without_queries(text), r#"["https://a/b.jsonl", "az://c/d", "why?"] 'http://e' f"#);
    }
}
