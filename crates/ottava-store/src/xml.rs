//! The few elements of answers that are read.

/// Returns the texts of all elements with this name, without other elements in them.
pub(crate) fn texts(xml: &str, name: &str) -> Vec<String> {
    let (start, end) = (format!("<{name}>"), format!("</{name}>"));
    xml.split(&start).skip(1).filter_map(|rest| Some(unescape(rest.split_once(&end)?.0))).collect()
}

/// Returns the text of the first element with this name.
pub(crate) fn text(xml: &str, name: &str) -> Option<String> {
    texts(xml, name).into_iter().next()
}

fn unescape(text: &str) -> String {
    let names = [("&lt;", "<"), ("&gt;", ">"), ("&quot;", "\""), ("&#34;", "\""), ("&apos;", "'"), ("&#39;", "'")];
    let text = names.into_iter().fold(text.to_string(), |text, (name, c)| text.replace(name, c));
    text.replace("&amp;", "&")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_found_and_unescaped() {
        let xml = "<L><C><Key>a&amp;lt;b</Key><Size>3</Size></C><C><Key>&#39;</Key></C><ETag>&quot;x&quot;</ETag></L>";
        assert_eq!(texts(xml, "Key"), ["a&lt;b", "'"]);
        assert_eq!(text(xml, "ETag").as_deref(), Some("\"x\""));
        assert_eq!(text(xml, "Name"), None);
    }
}
