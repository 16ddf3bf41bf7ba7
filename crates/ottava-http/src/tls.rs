//! TLS without C: rustls with graviola, and the system's root certificates.

use ottava_common::{Error, Result};
use std::sync::{Arc, OnceLock};
use ureq::tls::{Certificate, RootCerts, TlsConfig};

/// Returns the configuration of all encrypted connections. Errors with [`Error::Config`] if the processor lacks an instruction that graviola needs,
/// or if the system has no root certificates.
pub(crate) fn config() -> Result<TlsConfig> {
    static CONFIG: OnceLock<Result<TlsConfig, String>> = OnceLock::new();
    CONFIG.get_or_init(load).clone().map_err(Error::Config)
}

fn load() -> Result<TlsConfig, String> {
    let missing = missing_features();
    if !missing.is_empty() {
        let names = missing.join(", ");
        return Err(format!(
            "HTTPS needs the processor's {names}, which this machine lacks; use http:// and a local proxy"
        ));
    }
    let found = rustls_native_certs::load_native_certs();
    if found.certs.is_empty() {
        let why = found.errors.first().map_or(String::new(), |error| format!(" ({error})"));
        return Err(format!(
            "no root certificates of the system were found{why}; install the package ca-certificates or set SSL_CERT_FILE"
        ));
    }
    let certificates: Vec<_> = found.certs.iter().map(|found| Certificate::from_der(found).to_owned()).collect();
    let config = TlsConfig::builder()
        .root_certs(RootCerts::Specific(Arc::new(certificates)))
        .unversioned_rustls_crypto_provider(Arc::new(rustls_graviola::default_provider()));
    Ok(config.build())
}

/// Lists the processor features that are missing and without which graviola would panic.
#[cfg(target_arch = "x86_64")]
fn missing_features() -> Vec<&'static str> {
    let has = [
        ("adx", is_x86_feature_detected!("adx")),
        ("aes", is_x86_feature_detected!("aes")),
        ("avx", is_x86_feature_detected!("avx")),
        ("avx2", is_x86_feature_detected!("avx2")),
        ("bmi1", is_x86_feature_detected!("bmi1")),
        ("bmi2", is_x86_feature_detected!("bmi2")),
        ("pclmulqdq", is_x86_feature_detected!("pclmulqdq")),
    ];
    has.into_iter().filter(|(_, has)| !has).map(|(name, _)| name).collect()
}

/// Lists the processor features that are missing and without which graviola would panic.
#[cfg(target_arch = "aarch64")]
fn missing_features() -> Vec<&'static str> {
    use std::arch::is_aarch64_feature_detected as has;
    let has = [("neon", has!("neon")), ("aes", has!("aes")), ("pmull", has!("pmull")), ("sha2", has!("sha2"))];
    has.into_iter().filter(|(_, has)| !has).map(|(name, _)| name).collect()
}
