"""Hold facts about countries, one row each: `name|capital|continent|currency|language`; `-` leaves a field out."""

from typing import NamedTuple


class Country(NamedTuple):
    """Hold one row; a field that the table leaves out is an empty string."""

    name: str
    capital: str
    continent: str
    currency: str
    language: str


_ROWS = """
Afghanistan|Kabul|Asia|afghani|Pashto
Albania|Tirana|Europe|lek|Albanian
Algeria|Algiers|Africa|dinar|Arabic
Andorra|Andorra la Vella|Europe|euro|Catalan
Angola|Luanda|Africa|kwanza|Portuguese
Argentina|Buenos Aires|South America|peso|Spanish
Armenia|Yerevan|Asia|dram|Armenian
Australia|Canberra|Oceania|dollar|English
Austria|Vienna|Europe|euro|German
Azerbaijan|Baku|Asia|manat|Azerbaijani
the Bahamas|Nassau|North America|dollar|English
Bahrain|Manama|Asia|dinar|Arabic
Bangladesh|Dhaka|Asia|taka|Bengali
Barbados|Bridgetown|North America|dollar|English
Belarus|Minsk|Europe|ruble|-
Belgium|Brussels|Europe|euro|-
Belize|Belmopan|North America|dollar|English
Benin|Porto-Novo|Africa|franc|French
Bhutan|Thimphu|Asia|ngultrum|Dzongkha
Bolivia|Sucre|South America|boliviano|Spanish
Bosnia and Herzegovina|Sarajevo|Europe|-|Bosnian
Botswana|Gaborone|Africa|pula|English
Brazil|Brasilia|South America|real|Portuguese
Brunei|Bandar Seri Begawan|Asia|dollar|Malay
Bulgaria|Sofia|Europe|-|Bulgarian
Burkina Faso|Ouagadougou|Africa|franc|French
Burundi|Gitega|Africa|franc|Kirundi
Cambodia|Phnom Penh|Asia|riel|Khmer
Cameroon|Yaounde|Africa|franc|French
Canada|Ottawa|North America|dollar|English
Cape Verde|Praia|Africa|escudo|Portuguese
Chad|N'Djamena|Africa|franc|Arabic
Chile|Santiago|South America|peso|Spanish
China|Beijing|Asia|yuan|Chinese
Colombia|Bogota|South America|peso|Spanish
Costa Rica|San Jose|North America|colon|Spanish
Croatia|Zagreb|Europe|euro|Croatian
Cuba|Havana|North America|peso|Spanish
Cyprus|Nicosia|Europe|euro|Greek
the Czech Republic|Prague|Europe|koruna|Czech
Denmark|Copenhagen|Europe|krone|Danish
Djibouti|Djibouti City|Africa|franc|-
the Dominican Republic|Santo Domingo|North America|peso|Spanish
Ecuador|Quito|South America|dollar|Spanish
Egypt|Cairo|Africa|pound|Arabic
El Salvador|San Salvador|North America|dollar|Spanish
Eritrea|Asmara|Africa|nakfa|Tigrinya
Estonia|Tallinn|Europe|euro|Estonian
Ethiopia|Addis Ababa|Africa|birr|Amharic
Fiji|Suva|Oceania|dollar|-
Finland|Helsinki|Europe|euro|Finnish
France|Paris|Europe|euro|French
Gabon|Libreville|Africa|franc|French
Gambia|Banjul|Africa|dalasi|English
Georgia|Tbilisi|Asia|lari|Georgian
Germany|Berlin|Europe|euro|German
Ghana|Accra|Africa|cedi|English
Greece|Athens|Europe|euro|Greek
Guatemala|Guatemala City|North America|quetzal|Spanish
Guinea|Conakry|Africa|franc|French
Guyana|Georgetown|South America|dollar|English
Haiti|Port-au-Prince|North America|gourde|-
Honduras|Tegucigalpa|North America|lempira|Spanish
Hungary|Budapest|Europe|forint|Hungarian
Iceland|Reykjavik|Europe|krona|Icelandic
India|New Delhi|Asia|rupee|Hindi
Indonesia|Jakarta|Asia|rupiah|Indonesian
Iran|Tehran|Asia|rial|Persian
Iraq|Baghdad|Asia|dinar|Arabic
Ireland|Dublin|Europe|euro|English
Italy|Rome|Europe|euro|Italian
Jamaica|Kingston|North America|dollar|English
Japan|Tokyo|Asia|yen|Japanese
Jordan|Amman|Asia|dinar|Arabic
Kazakhstan|Astana|Asia|tenge|Kazakh
Kenya|Nairobi|Africa|shilling|Swahili
Kuwait|Kuwait City|Asia|dinar|Arabic
Kyrgyzstan|Bishkek|Asia|som|Kyrgyz
Laos|Vientiane|Asia|kip|Lao
Latvia|Riga|Europe|euro|Latvian
Lebanon|Beirut|Asia|pound|Arabic
Lesotho|Maseru|Africa|loti|Sesotho
Liberia|Monrovia|Africa|dollar|English
Libya|Tripoli|Africa|dinar|Arabic
Liechtenstein|Vaduz|Europe|franc|German
Lithuania|Vilnius|Europe|euro|Lithuanian
Luxembourg|Luxembourg City|Europe|euro|-
Madagascar|Antananarivo|Africa|ariary|Malagasy
Malawi|Lilongwe|Africa|kwacha|-
Malaysia|Kuala Lumpur|Asia|ringgit|Malay
the Maldives|Male|Asia|rufiyaa|-
Mali|Bamako|Africa|franc|-
Malta|Valletta|Europe|euro|Maltese
Mauritania|Nouakchott|Africa|ouguiya|Arabic
Mauritius|Port Louis|Africa|rupee|-
Mexico|Mexico City|North America|peso|Spanish
Moldova|Chisinau|Europe|leu|Romanian
Monaco|Monaco|Europe|euro|French
Mongolia|Ulaanbaatar|Asia|tugrik|Mongolian
Montenegro|Podgorica|Europe|euro|Montenegrin
Morocco|Rabat|Africa|dirham|Arabic
Mozambique|Maputo|Africa|metical|Portuguese
Myanmar|Naypyidaw|Asia|kyat|Burmese
Namibia|Windhoek|Africa|dollar|English
Nepal|Kathmandu|Asia|rupee|Nepali
the Netherlands|Amsterdam|Europe|euro|Dutch
New Zealand|Wellington|Oceania|dollar|English
Nicaragua|Managua|North America|cordoba|Spanish
Niger|Niamey|Africa|franc|-
Nigeria|Abuja|Africa|naira|English
North Korea|Pyongyang|Asia|won|Korean
North Macedonia|Skopje|Europe|denar|Macedonian
Norway|Oslo|Europe|krone|Norwegian
Oman|Muscat|Asia|rial|Arabic
Pakistan|Islamabad|Asia|rupee|Urdu
Panama|Panama City|North America|balboa|Spanish
Papua New Guinea|Port Moresby|Oceania|kina|-
Paraguay|Asuncion|South America|guarani|Spanish
Peru|Lima|South America|sol|Spanish
the Philippines|Manila|Asia|peso|Filipino
Poland|Warsaw|Europe|zloty|Polish
Portugal|Lisbon|Europe|euro|Portuguese
Qatar|Doha|Asia|riyal|Arabic
Romania|Bucharest|Europe|leu|Romanian
Russia|Moscow|Europe|ruble|Russian
Rwanda|Kigali|Africa|franc|Kinyarwanda
Samoa|Apia|Oceania|tala|Samoan
San Marino|San Marino|Europe|euro|Italian
Saudi Arabia|Riyadh|Asia|riyal|Arabic
Senegal|Dakar|Africa|franc|French
Serbia|Belgrade|Europe|dinar|Serbian
Sierra Leone|Freetown|Africa|leone|English
Singapore|Singapore|Asia|dollar|-
Slovakia|Bratislava|Europe|euro|Slovak
Slovenia|Ljubljana|Europe|euro|Slovene
Somalia|Mogadishu|Africa|shilling|Somali
South Africa|Pretoria|Africa|rand|-
South Korea|Seoul|Asia|won|Korean
South Sudan|Juba|Africa|pound|English
Spain|Madrid|Europe|euro|Spanish
Sri Lanka|Colombo|Asia|rupee|Sinhala
Sudan|Khartoum|Africa|pound|Arabic
Suriname|Paramaribo|South America|dollar|Dutch
Sweden|Stockholm|Europe|krona|Swedish
Switzerland|Bern|Europe|franc|German
Syria|Damascus|Asia|pound|Arabic
Taiwan|Taipei|Asia|dollar|Chinese
Tajikistan|Dushanbe|Asia|somoni|Tajik
Tanzania|Dodoma|Africa|shilling|Swahili
Thailand|Bangkok|Asia|baht|Thai
Togo|Lome|Africa|franc|French
Tonga|Nuku'alofa|Oceania|-|Tongan
Trinidad and Tobago|Port of Spain|North America|dollar|English
Tunisia|Tunis|Africa|dinar|Arabic
Turkey|Ankara|Asia|lira|Turkish
Turkmenistan|Ashgabat|Asia|manat|Turkmen
Uganda|Kampala|Africa|shilling|English
Ukraine|Kyiv|Europe|hryvnia|Ukrainian
the United Arab Emirates|Abu Dhabi|Asia|dirham|Arabic
the United Kingdom|London|Europe|pound|English
the United States|Washington|North America|dollar|English
Uruguay|Montevideo|South America|peso|Spanish
Uzbekistan|Tashkent|Asia|som|Uzbek
Venezuela|Caracas|South America|bolivar|Spanish
Vietnam|Hanoi|Asia|dong|Vietnamese
Yemen|Sanaa|Asia|rial|Arabic
Zambia|Lusaka|Africa|kwacha|English
Zimbabwe|Harare|Africa|-|-
"""


def _parse(row: str) -> Country:
    return Country(*("" if field == "-" else field for field in row.split("|")))


COUNTRIES: tuple[Country, ...] = tuple(_parse(row) for row in _ROWS.strip().splitlines())
