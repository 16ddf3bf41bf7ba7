use super::*;

fn read(bytes: &[u8]) -> Result<Pickle, String> {
    Pickle::read(bytes, |name| name.starts_with("known."))
}

fn text(text: &str) -> Vec<u8> {
    [&[0x8C, text.len() as u8], text.as_bytes()].concat()
}

/// Returns `{"a": [1, -2, 2.5, None, True, (300, "x")], "b": known.Class(7)}` in protocol 4. `b` has the attribute `n` with the value -3.
fn good() -> Vec<u8> {
    let list =
        [&b"]\x94(K\x01J\xfe\xff\xff\xffG\x40\x04\0\0\0\0\0\0N\x88M\x2c\x01"[..], &text("x"), b"\x86\x94e"].concat();
    let object = [
        &text("known")[..],
        b"\x94",
        &text("Class"),
        b"\x94\x93\x94K\x07\x85\x94R\x94}",
        &text("n"),
        b"\x8a\x01\xfdsb",
    ]
    .concat();
    let frame = [b"\x80\x04\x95".to_vec(), 0u64.to_le_bytes().to_vec()].concat();
    [&frame[..], b"}\x94(", &text("a"), &list, &text("b"), &object, b"u."].concat()
}

#[test]
fn values_objects_and_attributes_are_nodes() {
    let pickle = read(&good()).unwrap();
    let list = pickle.items(pickle.get(pickle.root(), "a").unwrap()).unwrap();
    let numbers: Vec<_> = list.iter().map(|id| pickle.node(*id).clone()).collect();
    assert_eq!(numbers[..5], [Node::Int(1), Node::Int(-2), Node::Float(2.5), Node::None, Node::Bool(true)]);
    let tuple = pickle.items(list[5]).unwrap();
    assert_eq!((pickle.count(tuple[0]), pickle.text(tuple[1])), (Some(300), Some("x")));
    let object = pickle.get(pickle.root(), "b").unwrap();
    let (name, arguments) = pickle.call(object).unwrap();
    assert_eq!((name, pickle.count(arguments[0])), ("known.Class", Some(7)));
    assert_eq!(*pickle.node(pickle.get(object, "n").unwrap()), Node::Int(-3));
    assert_eq!((pickle.count(list[1]), pickle.get(pickle.root(), "c")), (None, None));
}

#[test]
fn every_cut_is_an_error() {
    let good = good();
    for end in 0..good.len() {
        assert!(read(&good[..end]).is_err(), "{end}");
    }
}

#[test]
fn depth_and_repetition_need_no_more_than_the_bytes() {
    // The pickle has a million nested lists, or a list that includes itself.
    let deep = [&b"\x80\x02"[..], &b"]".repeat(1_000_000), &b"a".repeat(999_999), b"."].concat();
    read(&deep).unwrap();
    read(b"\x80\x02]q\x00h\x00a.").unwrap();
    // Each tuple has the previous tuple twice: copies would have 2^100 items.
    let double = [&b"\x80\x02N"[..], &b"2\x86".repeat(100), b"."].concat();
    read(&double).unwrap();
    for (bytes, words) in [
        (&b"\x80\x02a."[..], "a value is missing on the stack"),
        (b"\x80\x02Ne.", "a mark is missing"),
        (b"\x80\x02(.", "a value is missing"),
        (b"\x80\x02h\x05.", "there is no value 5 in its memo"),
        (b"\x80\x02X\xff\xff\xff\xff.", "its pickle is cut off"),
        (b"\x80\x02NK\x01s.", "a value is missing"),
        (b"\x80\x02NNNs.", "keys are set in what is no dictionary"),
        (b"\x80\x02NNb.", "a state is set of what has none"),
        (b"\x80\x02I1\n.", "the opcode 0x49 is not read"),
        (b"\x80\x02cother\nname\n.", "it refers to `other.name`"),
    ] {
        let error = read(bytes).unwrap_err();
        assert!(error.contains(words), "{error} lacks {words:?}");
    }
}
